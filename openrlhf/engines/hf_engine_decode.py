"""The rows of a transformers model that are being decoded together, and one step of all of them.

Suffixes: R rows, P prompts of a prefill, L tokens of the longest of them, V vocabulary, C columns
of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openrlhf.engines.base import Completion, SamplingSettings
from openrlhf.engines.hf_engine_cache import SlotCache, TokenHistory
from openrlhf.engines.sampling import penalize_repeats, sample_tokens
from openrlhf.utils.packable import is_padded

NO_TOKEN = -1
MAX_LOGITS = 2**27  # numbers at once, where logits of all positions are computed


@dataclass
class Row:
    """One completion while it is sampled."""

    request: int  # index of its request
    sample: int  # which of its samples
    sampling: SamplingSettings
    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    uniforms: list[float] = field(default_factory=list)  # of a seeded row, drawn beforehand
    prompt: Sequence[int] = ()  # known from the prefill on

    def __post_init__(self) -> None:
        if self.sampling.seed is not None:
            generator = torch.Generator().manual_seed(self.sampling.seed + self.sample)
            draws = torch.rand(
                self.sampling.max_new_tokens, generator=generator, dtype=torch.float64
            )
            self.uniforms = draws.tolist()

    def completion(self, weight_version: int) -> Completion:
        """The finished answer."""
        stopped = self.token_ids[-1] in self.sampling.stop_token_ids
        return Completion(
            tuple(self.token_ids),
            tuple(self.logprobs),
            finish_reason="stop" if stopped else "length",
            weight_version=weight_version,
        )


class DecodeBatch:
    """R live rows, their cache, and the logits of their next tokens.

    The order of calls is `sample`, now and then `take_done`, `forward`, now and then `add`.
    """

    def __init__(self, model: Any, generator: torch.Generator | None = None) -> None:
        self.model = model
        self.generator = generator  # of the random numbers; None: torch's own
        self.device = model.device
        self.rows: list[Row] = []
        self.cache = self._new_cache()
        self.num_padded_R = torch.empty(
            0, dtype=torch.int64, device=self.device
        )  # columns before a row
        self.logits_RV = torch.empty(0, device=self.device)
        self.tokens_R = torch.empty(0, dtype=torch.int64, device=self.device)  # drawn last
        self._regroup()

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[Row]]) -> None:
        """Prefill P prompts; prompt p is continued by each of `rows[p]`."""
        self._record()
        for prompt, group in zip(prompts, rows, strict=True):
            for row in group:
                row.prompt = prompt
        num_columns = max(len(prompt) for prompt in prompts)
        num_padded_P = self._tensor([num_columns - len(prompt) for prompt in prompts])
        token_ids_PL = self._tensor(
            [[0] * (num_columns - len(prompt)) + list(prompt) for prompt in prompts]
        )
        cache = self._new_cache()
        logits_PV = self._forward(token_ids_PL, num_padded_P, cache)
        owner_R = self._tensor([p for p, group in enumerate(rows) for _ in group])
        if len(owner_R) > len(prompts):
            cache.take_rows(owner_R)
        self._join(cache, num_padded_P[owner_R], logits_PV[owner_R])
        self.rows += [row for group in rows for row in group]
        self._regroup()

    def sample(self) -> int:
        """Draw the next token of every row; answers how many rows are done."""
        uniform_R = torch.rand(
            len(self.rows), dtype=torch.float64, device=self.device, generator=self.generator
        )
        for index in self.seeded:
            row = self.rows[index]
            position = len(row.token_ids) + len(self.steps)
            uniform_R[index] = row.uniforms[min(position, len(row.uniforms) - 1)]
        logits_RV = self.logits_RV
        if self.seen_RV is not None:
            logits_RV = penalize_repeats(logits_RV, self.seen_RV, self.penalty_R)
        self.tokens_R, logprobs_R = sample_tokens(
            logits_RV, self.temperature_R, self.top_p_R, uniform_R
        )
        if self.seen_RV is not None:
            self.seen_RV.scatter_(1, self.tokens_R[:, None], value=True)
        self.steps.append((self.tokens_R, logprobs_R))
        self.num_valid_R += ~self.is_done_R
        is_stop_R = (self.tokens_R[:, None] == self.stop_ids_RS).any(-1)
        self.is_done_R |= is_stop_R | (self.num_valid_R >= self.num_left_R)
        return int(self.is_done_R.sum())

    def forward(self) -> None:
        """Compute the logits after the tokens that were drawn last."""
        self.logits_RV = self._forward(self.tokens_R[:, None], self.num_padded_R, self.cache)

    def take_done(self) -> list[Row]:
        """Take the finished rows out; comes before `forward`."""
        is_done = self.is_done_R.tolist()
        self._record()
        done = [row for row, is_out in zip(self.rows, is_done, strict=True) if is_out]
        keep_R = self._tensor([index for index, is_out in enumerate(is_done) if not is_out])
        self.rows = [row for row, is_out in zip(self.rows, is_done, strict=True) if not is_out]
        self.tokens_R = self.tokens_R[keep_R]
        self.num_padded_R = self.num_padded_R[keep_R]
        if not self.rows:
            self.cache = self._new_cache()
        else:
            num_unused = int(self.num_padded_R.min())
            self.cache.drop_left(num_unused)
            self.num_padded_R -= num_unused
            self.cache.take_rows(keep_R)
        self._regroup()
        return done

    def _forward(
        self, token_ids_RL: Tensor, num_padded_R: Tensor, cache: SlotCache | TokenHistory
    ) -> Tensor:
        """Run the model on new columns; answers the logits after the last one, (R, V)."""
        if isinstance(cache, TokenHistory):
            cache.append(token_ids_RL)
            return self._recompute(cache.tokens_RL, num_padded_R)
        num_columns = cache.width + token_ids_RL.shape[1]
        columns_C = torch.arange(num_columns, device=self.device)
        positions_RC = columns_C - num_padded_R[:, None]
        output = self.model(
            input_ids=token_ids_RL,
            attention_mask=(positions_RC >= 0).long(),
            position_ids=positions_RC[:, cache.width :].clamp_min(0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _recompute(self, token_ids_RC: Tensor, num_padded_R: Tensor) -> Tensor:
        """Run the model on whole rows, padded on the right; logits after their ends, (R, V)."""
        num_columns = token_ids_RC.shape[1]
        columns_C = torch.arange(num_columns, device=self.device)
        lengths_R = num_columns - num_padded_R
        shifted_RC = (columns_C + num_padded_R[:, None]).clamp_max(num_columns - 1)
        token_ids_RC = token_ids_RC.gather(1, shifted_RC)
        is_token_RC = columns_C < lengths_R[:, None]
        num_tokens = self.model.config.get_text_config().vocab_size
        num_rows = max(MAX_LOGITS // (num_columns * num_tokens), 1)
        parts = []
        for start in range(0, len(lengths_R), num_rows):
            chosen = slice(start, start + num_rows)
            logits_rCV = self.model(
                input_ids=token_ids_RC[chosen],
                attention_mask=is_token_RC[chosen].long(),
                use_cache=False,
            ).logits
            ends_r = lengths_R[chosen] - 1
            parts.append(logits_rCV[torch.arange(len(ends_r), device=self.device), ends_r])
        return torch.cat(parts)

    def _join(
        self, cache: SlotCache | TokenHistory, num_padded_R: Tensor, logits_RV: Tensor
    ) -> None:
        """Put freshly prefilled rows below the live ones."""
        if not self.rows:
            self.cache, self.num_padded_R, self.logits_RV = cache, num_padded_R, logits_RV
            return
        more_here = max(cache.width - self.cache.width, 0)
        more_there = max(self.cache.width - cache.width, 0)
        self.num_padded_R = torch.cat([self.num_padded_R + more_here, num_padded_R + more_there])
        self.logits_RV = torch.cat([self.logits_RV, logits_RV])
        self.cache.join(cache)

    def _record(self) -> None:
        """Move what was drawn since the last regrouping into the rows."""
        if not self.steps:
            return
        tokens = torch.stack([tokens_R for tokens_R, _ in self.steps], dim=1).tolist()
        logprobs = torch.stack([logprobs_R for _, logprobs_R in self.steps], dim=1).tolist()
        for index, num_valid in enumerate(self.num_valid_R.tolist()):
            self.rows[index].token_ids += tokens[index][:num_valid]
            self.rows[index].logprobs += logprobs[index][:num_valid]
        self.steps = []

    def _regroup(self) -> None:
        """Settings of the rows as tensors, and the count of what is drawn from here on."""
        settings = [row.sampling for row in self.rows]
        num_stops = max((len(s.stop_token_ids) for s in settings), default=0)
        padded = [
            [*s.stop_token_ids] + [NO_TOKEN] * (num_stops - len(s.stop_token_ids)) for s in settings
        ]
        self.stop_ids_RS = self._tensor(padded).view(len(settings), num_stops)
        self.temperature_R = self._tensor([s.temperature for s in settings], torch.float32)
        self.top_p_R = self._tensor([s.top_p for s in settings], torch.float64)
        self.num_left_R = self._tensor(
            [row.sampling.max_new_tokens - len(row.token_ids) for row in self.rows]
        )
        self.penalty_R = self._tensor([s.repetition_penalty for s in settings], torch.float32)
        self.seen_RV = self._seen() if any(s.repetition_penalty != 1 for s in settings) else None
        self.seeded = [index for index, row in enumerate(self.rows) if row.uniforms]
        self.steps: list[tuple[Tensor, Tensor]] = []
        self.num_valid_R = torch.zeros_like(self.num_left_R)
        self.is_done_R = torch.zeros_like(self.num_left_R, dtype=torch.bool)

    def _seen(self) -> Tensor:
        """Which tokens stand in the prompt or the response of a row, (R, V) bool."""
        num_tokens = self.model.config.get_text_config().vocab_size
        seen_RV = torch.zeros(len(self.rows), num_tokens, dtype=torch.bool, device=self.device)
        for index, row in enumerate(self.rows):
            seen_RV[index, self._tensor([*row.prompt, *row.token_ids])] = True
        return seen_RV

    def _new_cache(self) -> SlotCache | TokenHistory:
        if is_padded(self.model):
            return TokenHistory()
        return SlotCache(self.model.config.get_text_config().num_hidden_layers)

    def _tensor(self, values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
