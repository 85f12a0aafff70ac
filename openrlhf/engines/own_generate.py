"""Generation with a transformers model's own `generate`: for debugging, and where there is no vLLM.

Tokens are chosen here rather than by transformers, for seeds of their own and for the log-probs
before top-p. Suffixes: R rows of a batch, L tokens so far, T tokens to come, V vocabulary.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from openrlhf.engines.base import (
    Completion,
    GenerationRequest,
    SamplingSettings,
    named_seed,
)
from openrlhf.utils.console import notice
from openrlhf.utils.images import ImageProcessor, is_vision
from openrlhf.utils.packing import attention_of, base_model_of, is_padded
from openrlhf.utils.tokenizer import Tokenizer

MAX_NUM_ROWS = 256
PAD = 0  # masked wherever it stands
BLOCK = 256  # tokens of a vocabulary that are summed up
# Attention that takes masks; "eager" is there for a reason.
KEPT_ATTENTION = ("eager", "sdpa", "openrlhf_packed")


class OwnGenerate:
    """A model that samples with its own `generate`.

    The model may be in training: its mode and its attention come back after each call. Sample k of
    a request takes the request's seed plus k. One without a seed gets it from its name, so that no
    number depends on which rank samples it, on what was sampled before, or on a restart.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_num_rows: int = MAX_NUM_ROWS,
        weight_version: int = 0,
        seed: int = 0,
        tokenizer: Tokenizer | None = None,
        processor: ImageProcessor | None = None,
    ) -> None:
        """`seed` is the run's. Stop texts need `tokenizer`, and images need `processor`."""
        self.model, self.max_num_rows, self.tokenizer = model, max_num_rows, tokenizer
        self.processor = processor
        self.weight_version, self.seed = weight_version, seed

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Return the completions of every request, in order; log-probs are those before top-p."""
        rows = [row for request in requests for row in one_by_one(request, self.seed)]
        answers: dict[int, Completion] = {}
        with generating(self.model) as base:
            for batch in self._batches(rows):
                asked = [rows[k] for k in batch]
                answers.update(zip(batch, self._sample(base, asked), strict=True))
        in_order = map(answers.__getitem__, range(len(rows)))
        return [list(islice(in_order, request.sampling.num_samples)) for request in requests]

    def _sample(self, base: Any, rows: Sequence[GenerationRequest]) -> list[Completion]:
        """Return the completions of a batch; where the device has no memory for it, of its halves,
        and of no more rows from then on. The seed of a row is its own.
        """
        try:
            return sample_rows(base, rows, self.weight_version, self.tokenizer, self.processor)
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        torch.cuda.empty_cache()
        half = self.max_num_rows = len(rows) // 2
        notice(f"no memory to sample {len(rows)} rows at once: {half} are, from now on")
        return [*self._sample(base, rows[:half]), *self._sample(base, rows[half:])]

    def _batches(self, rows: Sequence[GenerationRequest]) -> Iterator[list[int]]:
        """Yield indices of rows to sample together, the longest prompts first; those of a batch
        share their settings.
        """
        kinds: dict[tuple[SamplingSettings, int], list[int]] = {}
        lengths = [len(row.prompt_token_ids) for row in rows]
        for k in sorted(range(len(rows)), key=lengths.__getitem__, reverse=True):
            # Padding would be seen in families without packed rows, and with a penalty.
            sampling = replace(rows[k].sampling, seed=None)
            one_length = is_padded(self.model) or sampling.repetition_penalty != 1
            kinds.setdefault((sampling, lengths[k] if one_length else 0), []).append(k)
        for alike in kinds.values():
            for begin in range(0, len(alike), self.max_num_rows):
                yield alike[begin : begin + self.max_num_rows]


def one_by_one(request: GenerationRequest, run_seed: int) -> Iterator[GenerationRequest]:
    """Yield a request of one sample for every sample, with a seed of its own."""
    sampling, seed = request.sampling, request.sampling.seed
    if seed is None:
        seed = named_seed(run_seed, request.request_id)
    for k in range(sampling.num_samples):
        yield replace(request, sampling=replace(sampling, num_samples=1, seed=seed + k))


class ChooseTokens(LogitsProcessor):
    """Choose the next token of every row, leave only it, and note its log-prob."""

    def __init__(
        self, sampling: SamplingSettings, uniform_RT: Tensor, bias: Mapping[int, float]
    ) -> None:
        """`uniform_RT`: float64 in [0, 1), at which distributions are inverted; `bias` is added to
        the logits of these tokens.
        """
        self.bias = bias
        self.is_greedy = sampling.temperature == 0
        self.temperature = sampling.temperature or 1.0
        self.cuts = LogitsProcessorList()
        if sampling.min_p > 0:
            self.cuts.append(MinPLogitsWarper(sampling.min_p))
        if sampling.top_k > 0:
            self.cuts.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.cuts.append(TopPLogitsWarper(sampling.top_p))
        self.uniform_RT = uniform_RT
        self.logprobs: list[Tensor] = []  # (R,) of every step

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (R, V) of 0 for the chosen tokens and -inf for the others."""
        for token_id, bias in self.bias.items():
            scores[:, token_id] += bias
        logprobs_RV = (scores.float() / self.temperature).log_softmax(-1)
        if self.is_greedy:
            tokens_R1 = scores.argmax(-1, keepdim=True)
        else:
            kept_RV = self.cuts(input_ids, logprobs_RV)
            tokens_R1 = tokens_at(self.uniform_RT[:, len(self.logprobs)], kept_RV.exp())
        self.logprobs.append(logprobs_RV.gather(-1, tokens_R1).squeeze(-1))
        return torch.full_like(scores, -math.inf).scatter_(1, tokens_R1, 0.0)


def tokens_at(share_R: Tensor, weights_RV: Tensor) -> Tensor:
    """Return the first tokens at which the sum of the weights passes these shares of all of it,
    (R, 1). Sums of blocks tell the block first: a sum over a whole vocabulary takes as long as a
    small model's step.
    """
    sums_RB = torch.stack([b.sum(-1, dtype=torch.float64) for b in weights_RV.split(BLOCK, -1)], -1)
    ends_RB = sums_RB.cumsum(-1)
    target_R1 = share_R[:, None] * ends_RB[:, -1:]
    block_R1 = torch.searchsorted(ends_RB, target_R1, right=True).clamp_max(sums_RB.size(1) - 1)
    token_RS = block_R1 * BLOCK + torch.arange(BLOCK, device=weights_RV.device)
    is_there_RS = token_RS < weights_RV.size(1)
    inside_RS = weights_RV.gather(1, token_RS.where(is_there_RS, 0)).double() * is_there_RS
    cumulative_RS = inside_RS.cumsum(-1)
    before_R1 = (ends_RB - sums_RB).gather(1, block_R1)
    # Both sums of a block may differ by a rounding: a token without weight is never taken.
    below_R1 = cumulative_RS[:, -1:].nextafter(torch.zeros_like(before_R1))
    place_R1 = torch.searchsorted(
        cumulative_RS, (target_R1 - before_R1).minimum(below_R1), right=True
    )
    return token_RS.gather(1, place_R1)


class StopTexts(StoppingCriteria):
    """Stop a row at the token that completes one of the texts, and note where."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, prompt_length: int) -> None:
        self.texts, self.decode, self.prompt_length = texts, tokenizer.decode, prompt_length
        # A token is at least one byte; one before them, whose leading space may get lost.
        self.num_read = max(len(text.encode()) for text in texts) + 1
        self.lengths: dict[int, int] = {}  # of responses that stopped, by row

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """Return for every row whether it stops, (R,) bool."""
        answers_RT = input_ids[:, self.prompt_length :]
        for row, token_ids in enumerate(answers_RT[:, -self.num_read :].tolist()):
            text = self.decode(token_ids) if row not in self.lengths else ""
            if any(stop in text for stop in self.texts):
                self.lengths[row] = answers_RT.size(1)
        is_done = [row in self.lengths for row in range(len(input_ids))]
        return torch.tensor(is_done, device=input_ids.device)


def uniform_of(rows: Sequence[GenerationRequest]) -> Tensor:
    """Return the random numbers of every row, (R, T) float64 in [0, 1), from its seed."""
    uniform_RT = torch.empty(len(rows), rows[0].sampling.max_new_tokens, dtype=torch.float64)
    for numbers_T, row in zip(uniform_RT, rows, strict=True):
        assert row.sampling.seed is not None, "a row without a seed"
        numbers_T.uniform_(generator=torch.Generator().manual_seed(row.sampling.seed))
    return uniform_RT


def sample_rows(
    model: Any,
    rows: Sequence[GenerationRequest],
    weight_version: int,
    tokenizer: Tokenizer | None,
    processor: ImageProcessor | None,
) -> list[Completion]:
    """Return the completion of every row; they run until the last one stops."""
    sampling, prompts = rows[0].sampling, [list(row.prompt_token_ids) for row in rows]
    num_padded = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    width = num_padded[0] + len(prompts[0])
    token_ids_RL = torch.tensor(
        [[PAD] * pad + prompt for pad, prompt in zip(num_padded, prompts, strict=True)],
        device=model.device,
    )
    num_padded_R = torch.tensor(num_padded, device=model.device)
    is_token_RL = torch.arange(width, device=model.device) >= num_padded_R[:, None]
    bias, sees = {}, {}
    if processor is not None:
        bias = processor.logit_bias
        sees = processor.inputs([picture for row in rows for picture in row.images], token_ids_RL)
    choose = ChooseTokens(sampling, uniform_of(rows).to(model.device), bias)
    model.generation_config = GenerationConfig(
        do_sample=False,  # `choose` has chosen
        max_new_tokens=sampling.max_new_tokens,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=list(sampling.stop_token_ids) or None,
        pad_token_id=PAD,
    )
    texts = []
    if sampling.stop:
        assert tokenizer is not None, "stop texts need a tokenizer"
        texts = [StopTexts(sampling.stop, tokenizer, width)]
    sampled = model.generate(
        token_ids_RL,
        attention_mask=is_token_RL.long(),
        logits_processor=LogitsProcessorList([choose]),
        stopping_criteria=StoppingCriteriaList(texts),
        synced_gpus=False,
        **shared_prompts(model, rows, token_ids_RL, is_token_RL),
        **sees,
    )[:, width:]
    logprobs = torch.stack(choose.logprobs, dim=1).tolist()
    completions = []
    for row, (token_ids, numbers) in enumerate(zip(sampled.tolist(), logprobs, strict=True)):
        ends = [k + 1 for k, token in enumerate(token_ids) if token in sampling.stop_token_ids]
        ends += [found.lengths[row] for found in texts if row in found.lengths]
        num_tokens = min(ends, default=len(token_ids))
        completions.append(
            Completion(
                tuple(token_ids[:num_tokens]),
                tuple(numbers[:num_tokens]),
                finish_reason="stop" if ends else "length",
                weight_version=weight_version,
            )
        )
    return completions


def shared_prompts(
    model: Any, rows: Sequence[GenerationRequest], token_ids_RL: Tensor, is_token_RL: Tensor
) -> dict[str, Cache]:
    """Return the argument of `generate` that holds keys and values of all but the last token of the
    prompts. A prompt of several rows is read once; with one row for each, or a model that reads
    images, which keeps positions of all rows, `generate` reads them itself.
    """
    first: dict[tuple[int, ...], int] = {}
    for k, row in enumerate(rows):
        first.setdefault(tuple(row.prompt_token_ids), k)
    if len(first) == len(rows) or min(map(len, first)) == 1 or is_vision(model.config):
        return {}
    distinct = list(first.values())
    cache = model.generate(
        token_ids_RL[distinct, :-1],
        attention_mask=is_token_RL[distinct, :-1].long(),
        max_new_tokens=1,
        return_dict_in_generate=True,
        synced_gpus=False,
    ).past_key_values
    row_of = {prompt: k for k, prompt in enumerate(first)}
    order = [row_of[tuple(row.prompt_token_ids)] for row in rows]
    cache.reorder_cache(torch.tensor(order, device=token_ids_RL.device))
    return {"past_key_values": cache}


@contextmanager
def generating(model: Any) -> Iterator[Any]:
    """Yield the model inside its adapters, in evaluation mode, without gradients, with attention
    that takes masks.
    """
    base = base_model_of(model)
    was_training, settings = model.training, base.generation_config
    attention = attention_of(base.config)
    model.eval()
    if attention[""] not in KEPT_ATTENTION and not is_padded(model):
        base.set_attn_implementation("sdpa")
    # The last states are a slice of all: torch would copy a frozen head for every row.
    hook = base.get_output_embeddings().register_forward_pre_hook(contiguous)
    try:
        with torch.no_grad():
            yield base
    finally:
        hook.remove()
        base.generation_config = settings
        if attention_of(base.config) != attention:
            base.set_attn_implementation(attention)
        model.train(was_training)


def contiguous(_head: object, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the arguments of a head without gaps in memory."""
    return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in states)
