"""From prompts to scored rollouts: ask the engines, check what they answer, have it scored.

Groups are scored as they are finished, while the engines go on with the others. Knows engines only
through their protocol and rewards only through `Scoring`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.errors import EngineError
from openrlhf.rollout.samplers import Sampler
from openrlhf.trainer.ppo_utils.batch_stream import BatchStream
from openrlhf.trainer.ppo_utils.engine_stream import EngineStream
from openrlhf.trainer.ppo_utils.group_stream import GroupStream
from openrlhf.trainer.ppo_utils.scoring import GroupScorer, Scoring
from openrlhf.utils.metrics import Metrics, timed
from openrlhf.utils.rollout import Rollout, check_completion, sequence_tensors
from openrlhf.utils.tokenizer import Tokenizer

OnGroup = Callable[[int, list[Completion]], None]


class Generator(Protocol):
    """Whatever answers generation requests in order: one engine or a pool of them."""

    def generate(
        self, requests: Sequence[GenerationRequest], on_group: OnGroup | None = None
    ) -> list[list[Completion]]:
        """Completions of every request. `on_group` is called in this thread with the position and
        the completions of each request, as soon as may be after it is finished.
        """


class ScoringStarter(Protocol):
    """Whatever gives every rollout its reward: a function, a model, several of them."""

    def begin(self) -> Scoring:
        """The scoring of a batch of prompts."""


@dataclass(frozen=True)
class SampleBatch:
    """The samples of a batch of prompts."""

    rollouts: list[Rollout]  # scored, prompt by prompt
    metrics: Metrics
    failed: dict[int, str]  # row -> why its samples were dropped


@runtime_checkable
class HasSamplers(Protocol):
    """A generator whose engines take requests one by one."""

    def samplers(self) -> list[Sampler]:
        """Return one for each engine."""


class SampleSource(Protocol):
    """Whatever makes the scored samples of a batch of prompts: engines, or agents."""

    @property
    def generator(self) -> object:
        """What the samples are generated with."""

    def generate_samples(
        self, prompts: Sequence[PromptRecord], sampling: SamplingSettings, *, tag: str
    ) -> SampleBatch:
        """See SamplesGenerator."""

    def open_stream(self, sampling: SamplingSettings) -> GroupStream:
        """Samples of prompts that are submitted one by one; one stream at a time."""


class SamplesGenerator:
    """Generates and scores the samples of a batch of prompts."""

    def __init__(
        self,
        generator: Generator,
        scorer: ScoringStarter,
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
    ) -> SampleBatch:
        """`num_samples` scored rollouts of each prompt, prompt by prompt; `tag` makes sample ids
        unique. `timing/reward` is what scoring takes longer than generation.
        """
        metrics = Metrics()
        scoring = self.scorer.begin()
        with timed("generation", metrics):
            self._generate(prompts, sampling, tag, scoring, metrics)
        with timed("reward", metrics):
            scored = scoring.finish()
        num_scored = len(prompts) - len(scored.failed)
        assert len(scored.rollouts) == num_scored * sampling.num_samples, "samples were lost"
        return SampleBatch(scored.rollouts, metrics.merge(scored.metrics), scored.failed)

    def open_stream(self, sampling: SamplingSettings) -> GroupStream:
        """See SampleSource; in rounds where the policy generates itself."""
        if isinstance(self.generator, HasSamplers) and isinstance(self.scorer, GroupScorer):
            # Tokenizers are not shared between threads.
            tokenizer = copy.deepcopy(self.tokenizer)
            maker = SamplesGenerator(
                self.generator, self.scorer, tokenizer, vocab_size=self.vocab_size
            )
            samplers = self.generator.samplers()
            return EngineStream(samplers, self.scorer, maker.make_group, sampling)
        return BatchStream(partial(self.generate_samples, sampling=sampling))

    def _generate(
        self,
        prompts: Sequence[PromptRecord],
        sampling: SamplingSettings,
        tag: str,
        scoring: Scoring,
        metrics: Metrics,
    ) -> None:
        requests = [
            GenerationRequest(f"{tag}/{prompt.row_id}", prompt.prompt_token_ids, sampling)
            for prompt in prompts
        ]

        def on_group(index: int, completions: list[Completion]) -> None:
            group = self.make_group(prompts[index], requests[index], completions, group_id=index)
            num_tokens = sum(rollout.num_actions for rollout in group)
            metrics.add("num_generated_tokens", num_tokens, reduction="sum")
            scoring.add(group)

        if scoring.is_streaming:
            self.generator.generate(requests, on_group)
        else:
            answers = self.generator.generate(requests)
            assert len(answers) == len(requests), "the engines answered another number of requests"
            for index, completions in enumerate(answers):
                on_group(index, completions)

    def make_group(
        self,
        prompt: PromptRecord,
        request: GenerationRequest,
        completions: Sequence[Completion],
        *,
        group_id: int,
    ) -> list[Rollout]:
        """The rollouts of a request, with their texts; EngineError for an impossible answer."""
        if len(completions) != request.sampling.num_samples:
            raise EngineError(
                f"request {request.request_id}: {len(completions)} completions, "
                f"asked for {request.sampling.num_samples}"
            )
        rollouts = [
            self._rollout(
                prompt, completion, group_id=group_id, sample_id=f"{request.request_id}/{k}"
            )
            for k, completion in enumerate(completions)
        ]
        ids = [r.token_ids[r.action_mask] for r in rollouts]
        whole, plain = (
            self.tokenizer.batch_decode(ids, skip_special_tokens=skips) for skips in (False, True)
        )
        return [
            replace(rollout, response_text=text, plain_response=words)
            for rollout, text, words in zip(rollouts, whole, plain, strict=True)
        ]

    def _rollout(
        self, prompt: PromptRecord, completion: Completion, *, group_id: int, sample_id: str
    ) -> Rollout:
        check_completion(
            sample_id, completion.token_ids, completion.logprobs, vocab_size=self.vocab_size
        )
        token_ids, action_mask = sequence_tensors(prompt.prompt_token_ids, completion.token_ids)
        return Rollout(
            sample_id=sample_id,
            group_id=group_id,
            row_id=prompt.row_id,
            token_ids=token_ids,
            action_mask=action_mask,
            logprobs=torch.tensor(completion.logprobs, dtype=torch.float32),
            weight_versions=torch.tensor(completion.token_versions, dtype=torch.int32),
            finish_reason=completion.finish_reason,
            prompt_text=prompt.prompt_text,
            response_text="",
            label=prompt.label,
            datasource=prompt.datasource,
            columns=prompt.columns,
            source_prompt=prompt.source,
        )
