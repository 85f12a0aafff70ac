"""From prompts to scored rollouts: ask the engines, check what they answer, score it.

Knows engines only through their protocol and rewards only through `Scorer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from openrlhf.datasets.prompts_dataset import PromptRecord
from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.errors import EngineError
from openrlhf.utils.metrics import Metrics, timed
from openrlhf.utils.rollout import Rollout, check_completion, sequence_tensors
from openrlhf.utils.tokenizer import Tokenizer


class Generator(Protocol):
    """Whatever answers generation requests in order: one engine or a pool of them."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Completions of every request."""


class Scorer(Protocol):
    """Whatever gives every rollout its reward: a function, a model, several of them."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts with reward, score and extra logs set; raises RewardError."""


class SamplesGenerator:
    """Generates and scores the samples of a batch of prompts."""

    def __init__(
        self,
        generator: Generator,
        scorer: Scorer,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
    ) -> None:
        self.generator = generator
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size

    def generate_samples(
        self,
        prompts: Sequence[PromptRecord],
        sampling: SamplingSettings,
        *,
        tag: str,
    ) -> tuple[list[Rollout], Metrics]:
        """`num_samples` scored rollouts of each prompt, prompt by prompt; `tag` makes sample ids
        unique.
        """
        metrics = Metrics()
        with timed("generation", metrics):
            rollouts = self._generate(prompts, sampling, tag)
        metrics.add("num_generated_tokens", sum(r.num_actions for r in rollouts), reduction="sum")
        with timed("reward", metrics):
            scored = self.scorer.score(rollouts)
        assert [r.sample_id for r in scored] == [r.sample_id for r in rollouts], "samples were lost"
        _add_score_metrics(scored, metrics)
        return scored, metrics

    def _generate(
        self, prompts: Sequence[PromptRecord], sampling: SamplingSettings, tag: str
    ) -> list[Rollout]:
        requests = [
            GenerationRequest(f"{tag}/{prompt.row_id}", prompt.prompt_token_ids, sampling)
            for prompt in prompts
        ]
        answers = self.generator.generate(requests)
        for request, completions in zip(requests, answers, strict=True):
            if len(completions) != sampling.num_samples:
                raise EngineError(
                    f"request {request.request_id}: {len(completions)} completions, "
                    f"asked for {sampling.num_samples}"
                )
        rollouts = [
            self._rollout(prompt, completion, group_id=group, sample_id=f"{request.request_id}/{k}")
            for group, (prompt, request, completions) in enumerate(
                zip(prompts, requests, answers, strict=True)
            )
            for k, completion in enumerate(completions)
        ]
        texts = self.tokenizer.batch_decode(
            [r.token_ids[r.action_mask] for r in rollouts], skip_special_tokens=False
        )
        return [replace(r, response_text=text) for r, text in zip(rollouts, texts, strict=True)]

    def _rollout(
        self, prompt: PromptRecord, completion: Completion, *, group_id: int, sample_id: str
    ) -> Rollout:
        check_completion(
            sample_id, completion.token_ids, completion.logprobs, vocab_size=self.vocab_size
        )
        token_ids, action_mask = sequence_tensors(prompt.prompt_token_ids, completion.token_ids)
        num_actions = len(completion.token_ids)
        return Rollout(
            sample_id=sample_id,
            group_id=group_id,
            row_id=prompt.row_id,
            token_ids=token_ids,
            action_mask=action_mask,
            logprobs=torch.tensor(completion.logprobs, dtype=torch.float32),
            weight_versions=torch.full(
                (num_actions,), completion.weight_version, dtype=torch.int32
            ),
            finish_reason=completion.finish_reason,
            prompt_text=prompt.prompt_text,
            response_text="",
            label=prompt.label,
            datasource=prompt.datasource,
            columns=prompt.columns,
        )


def _add_score_metrics(rollouts: Sequence[Rollout], metrics: Metrics) -> None:
    for rollout in rollouts:
        if rollout.score is not None:
            metrics.add("score", rollout.score)
        for name, value in rollout.extra_logs.items():
            metrics.add(f"extra/{name}", value)  # never mixed with the trainer's own
