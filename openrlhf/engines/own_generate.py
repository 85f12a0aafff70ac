"""Generation with a transformers model's own `generate`: for debugging, and where there is no vLLM.

Rows are drawn here rather than by transformers, for seeds of their own and for the log-probs before
top-p. Suffixes: R rows of a batch, L tokens so far, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.engines.sampling import penalize_repeats, sample_tokens
from openrlhf.errors import EngineError
from openrlhf.utils.packable import is_padded

MAX_NUM_ROWS = 256
PAD = 0  # masked wherever it stands
# Attention that takes masks; "eager" is there for a reason.
KEPT_ATTENTION = ("eager", "sdpa", "openrlhf_packed")


@dataclass(frozen=True)
class Row:
    """One sample of a request."""

    request: int  # index of its request
    sample: int  # which of its samples
    prompt: tuple[int, ...]
    sampling: SamplingSettings


class OwnGenerate:
    """A model that samples with its own `generate`; calls from several threads take turns.

    The model may be in training: its mode and its attention come back after each call. Ranks are
    seeded alike: those that sample side by side give a `stream` each, and draw different numbers.
    Stream 0 takes them from torch's own generator, the others begin theirs there at every call, so
    its state is all that a checkpoint has to hold.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_num_rows: int = MAX_NUM_ROWS,
        weight_version: int = 0,
        stream: int = 0,
    ) -> None:
        self.model = model
        self.stream = stream
        self.max_num_rows = max_num_rows
        self.weight_version = weight_version
        self._lock = threading.Lock()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Return the completions of every request, in order; log-probs are those before top-p.

        Raises EngineError for an empty prompt.
        """
        for request in requests:
            if not request.prompt_token_ids or request.sampling.max_new_tokens < 1:
                raise EngineError(
                    f"request {request.request_id} has no prompt or no room to answer"
                )
        answers: list[list[Any]] = [[None] * r.sampling.num_samples for r in requests]
        with self._lock, generating(self.model) as base:
            generator = self._generator()
            for rows in self._batches(requests):
                completions = sample_rows(base, rows, generator, self.weight_version)
                for row, completion in zip(rows, completions, strict=True):
                    answers[row.request][row.sample] = completion
        return answers

    def _generator(self) -> torch.Generator | None:
        """Return where this call's random numbers come from; None: torch's own generator."""
        if self.stream == 0:
            return None
        start = int(torch.randint(2**31, ())) + self.stream
        return torch.Generator(self.model.device).manual_seed(start)

    def _batches(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Row]]:
        """Yield rows to sample together, the longest prompts first; those of a batch share stop
        tokens, and fit into the model's positions as long as the batch runs.

        Families without packed rows would see padding: their prompts are of one length.
        """
        rows = [
            Row(index, sample, request.prompt_token_ids, request.sampling)
            for index, request in enumerate(requests)
            for sample in range(request.sampling.num_samples)
        ]
        rows.sort(key=lambda row: (row.sampling.stop_token_ids, -len(row.prompt)))
        text = self.model.config.get_text_config()
        num_positions = getattr(text, "max_position_embeddings", None) or math.inf
        one_length = is_padded(self.model)
        batch: list[Row] = []
        for row in rows:
            first = batch[0] if batch else row
            num_new = max(r.sampling.max_new_tokens for r in (*batch, row))
            fits = (
                len(batch) < self.max_num_rows
                and row.sampling.stop_token_ids == first.sampling.stop_token_ids
                and len(first.prompt) + num_new <= num_positions
                and (not one_length or len(row.prompt) == len(first.prompt))
            )
            if batch and not fits:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch


class DrawTokens(LogitsProcessor):
    """Draw the next token of every row, leave only it to choose from, and note its log-prob."""

    def __init__(
        self, rows: Sequence[Row], is_token_RL: Tensor, generator: torch.Generator | None
    ) -> None:
        """`is_token_RL` is False where a prompt is padded."""
        device = is_token_RL.device
        settings = [row.sampling for row in rows]
        self.logprobs: list[Tensor] = []  # (R,) of every step
        self._is_token_RL = is_token_RL
        self._generator = generator
        self._temperature_R = torch.tensor([s.temperature for s in settings], device=device)
        self._top_p_R = torch.tensor(
            [s.top_p for s in settings], dtype=torch.float64, device=device
        )
        penalties = [s.repetition_penalty for s in settings]
        self._penalty_R = torch.tensor(penalties, device=device)
        self._has_penalty = any(penalty != 1 for penalty in penalties)
        # Numbers of seeded rows are drawn beforehand: they do not depend on the other rows.
        self._seeded = {index: uniforms(row) for index, row in enumerate(rows) if has_seed(row)}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (R, V) of 0 for the drawn tokens and -inf for the others."""
        logits_RV = penalize_repeats(scores, self._seen(input_ids, scores), self._penalty_R)
        uniform_R = torch.rand(
            len(scores), dtype=torch.float64, device=scores.device, generator=self._generator
        )
        position = len(self.logprobs)
        for index, numbers in self._seeded.items():
            uniform_R[index] = numbers[min(position, len(numbers) - 1)]
        tokens_R, logprobs_R = sample_tokens(
            logits_RV, self._temperature_R, self._top_p_R, uniform_R
        )
        self.logprobs.append(logprobs_R)
        chosen_RV = torch.full_like(scores, -math.inf)
        return chosen_RV.scatter_(1, tokens_R[:, None], 0.0)

    def _seen(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return which tokens stand in the prompt or the response of a row, (R, V) bool."""
        seen_RV = torch.zeros_like(scores, dtype=torch.bool)
        if self._has_penalty:
            is_token_RL = torch.ones_like(input_ids, dtype=torch.bool)
            is_token_RL[:, : self._is_token_RL.shape[1]] = self._is_token_RL
            rows, columns = is_token_RL.nonzero(as_tuple=True)
            seen_RV[rows, input_ids[rows, columns]] = True
        return seen_RV


def has_seed(row: Row) -> bool:
    """Return True for a row with random numbers of its own."""
    return row.sampling.seed is not None


def uniforms(row: Row) -> list[float]:
    """Return the random numbers of a seeded row; sample k of a request takes its seed plus k."""
    assert row.sampling.seed is not None
    generator = torch.Generator().manual_seed(row.sampling.seed + row.sample)
    num_tokens = row.sampling.max_new_tokens
    return torch.rand(num_tokens, generator=generator, dtype=torch.float64).tolist()


def sample_rows(
    model: Any, rows: Sequence[Row], generator: torch.Generator | None, weight_version: int
) -> list[Completion]:
    """Return the completion of every row; they run until the last one stops."""
    width = max(len(row.prompt) for row in rows)
    token_ids_RL = torch.tensor(
        [[PAD] * (width - len(row.prompt)) + list(row.prompt) for row in rows], device=model.device
    )
    num_padded_R = torch.tensor([width - len(row.prompt) for row in rows], device=model.device)
    is_token_RL = torch.arange(width, device=model.device) >= num_padded_R[:, None]
    draw = DrawTokens(rows, is_token_RL, generator)
    model.generation_config = GenerationConfig(
        do_sample=False,  # `draw` has chosen
        max_new_tokens=max(row.sampling.max_new_tokens for row in rows),
        eos_token_id=list(rows[0].sampling.stop_token_ids) or None,
        pad_token_id=PAD,
    )
    sampled = model.generate(
        token_ids_RL,
        attention_mask=is_token_RL.long(),
        logits_processor=LogitsProcessorList([draw]),
        synced_gpus=False,
    )[:, width:]
    logprobs = torch.stack(draw.logprobs, dim=1).tolist()
    return [
        completion(row, tokens, numbers, weight_version)
        for row, tokens, numbers in zip(rows, sampled.tolist(), logprobs, strict=True)
    ]


def completion(
    row: Row, token_ids: Sequence[int], logprobs: Sequence[float], weight_version: int
) -> Completion:
    """Return a row's part of what its batch sampled, up to its first stop token or its limit."""
    sampling = row.sampling
    own = token_ids[: sampling.max_new_tokens]
    going = itertools.takewhile(lambda token: token not in sampling.stop_token_ids, own)
    num_going = len(list(going))
    is_stopped = num_going < len(own)
    num_tokens = num_going + int(is_stopped)
    return Completion(
        tuple(own[:num_tokens]),
        tuple(logprobs[:num_tokens]),
        finish_reason="stop" if is_stopped else "length",
        weight_version=weight_version,
    )


@contextmanager
def generating(model: Any) -> Iterator[Any]:
    """Yield the model inside its adapters, in evaluation mode, without gradients, with attention
    that takes masks.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    was_training, settings = model.training, base.generation_config
    attention = base.config._attn_implementation
    model.eval()
    if attention not in KEPT_ATTENTION and not is_padded(model):
        base.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            yield base
    finally:
        base.generation_config = settings
        if base.config._attn_implementation != attention:
            base.set_attn_implementation(attention)
        model.train(was_training)
