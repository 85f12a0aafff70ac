"""Answers of the student itself, for on-policy distillation.

Prompts come from the data; before every step the student answers those of the step. Each answer has
a seed of its own from step and row, so it is the same whatever the number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openrlhf.datasets.sft_dataset import SFTExample
from openrlhf.distributed.collectives import all_gather_object
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.engines.base import GenerationRequest, RolloutEngine, SamplingSettings
from openrlhf.trainer.base_trainer import SampleSet


@dataclass(frozen=True)
class AnswerSettings:
    """How the student answers."""

    sampling: SamplingSettings
    max_len: int  # tokens of prompt and answer
    seed: int = 42


class StudentAnswers:
    """A set of samples in which rows that were answered have the student's answer."""

    def __init__(
        self, samples: SampleSet[SFTExample], engine: RolloutEngine, settings: AnswerSettings
    ) -> None:
        self._samples = samples
        self._engine = engine
        self._settings = settings
        self._answered: dict[int, SFTExample] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> SFTExample:
        return self._answered.get(index) or self._samples[index]

    @property
    def lengths(self) -> Tensor:
        """Tokens of every sample, (len,) int64."""
        lengths = self._samples.lengths.clone()
        for row, example in self._answered.items():
            lengths[row] = len(example.token_ids)
        return lengths

    def answer(self, rows: Sequence[int], step: int, strategy: DeepSpeedStrategy) -> None:
        """Answer the prompts of these rows anew and forget all other answers; all ranks call."""
        topology = strategy.topology
        own_rows = rows[topology.dp_rank :: topology.dp_size]
        requests = [self._request(row, step) for row in own_rows]
        answers = self._engine.generate(requests) if requests else []
        own = {
            row: request.prompt_token_ids + completion.token_ids
            for row, request, [completion] in zip(own_rows, requests, answers, strict=True)
        }
        self._answered = {}
        for part in all_gather_object(own):
            for row, token_ids in part.items():
                if row not in self._answered:  # ranks that share rows take those of the first
                    self._answered[row] = self._example(row, token_ids)

    def _request(self, row: int, step: int) -> GenerationRequest:
        prompt = self._prompt(row)
        settings = self._settings
        room = min(settings.sampling.max_new_tokens, settings.max_len - len(prompt))
        draw = random.Random(f"{settings.seed} {step} {row}").getrandbits(31)
        sampling = replace(settings.sampling, max_new_tokens=room, seed=draw)
        return GenerationRequest(str(row), prompt, sampling)

    def _prompt(self, row: int) -> tuple[int, ...]:
        """What stands before the data's answer; it always leaves room for one token at least."""
        sample = self._samples[row]
        return tuple(sample.token_ids[: int(sample.loss_mask.int().argmax())].tolist())

    def _example(self, row: int, token_ids: Sequence[int]) -> SFTExample:
        mask = torch.ones(len(token_ids), dtype=torch.bool)
        mask[: len(self._prompt(row))] = False
        return SFTExample(torch.tensor(token_ids), mask)
