"""From prompts to scored rollouts: ask the engines, check what they answer, have it scored.

Groups are scored as they are finished, while the engines go on with the others.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.errors import EngineError
from openrlhf.rollout.engine_pool import EnginePool
from openrlhf.trainer.ppo_utils.engine_stream import EngineStream
from openrlhf.trainer.ppo_utils.group_stream import FinishedGroup
from openrlhf.trainer.ppo_utils.scoring import GroupScorer, check_scores
from openrlhf.trainer.ppo_utils.task_stream import TaskStream
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.progress import progress
from openrlhf.utils.rollout import Rollout, check_completion, sequence_tensors
from openrlhf.utils.threads import LoopThread
from openrlhf.utils.tokenizer import Tokenizer

POLL_S = 2.0  # of one look at a stream; a group ends it at once


@dataclass(frozen=True)
class SampleBatch:
    """The samples of a batch of prompts."""

    rollouts: list[Rollout]  # scored, prompt by prompt
    metrics: Metrics
    failed: dict[int, str]  # row -> why its samples were dropped


class SampleSource(ABC):
    """Whatever makes the scored samples of prompts: engines and rewards, or agents."""

    @abstractmethod
    def open_stream(self, sampling: SamplingSettings) -> TaskStream:
        """Return a stream of the samples of prompts that are submitted one by one."""

    def generate_samples(
        self, prompts: Sequence[PromptRecord], sampling: SamplingSettings, *, tag: str
    ) -> SampleBatch:
        """Return the scored samples of each prompt, prompt by prompt; `tag` makes sample ids
        unique. `timing/reward` is what scoring takes longer than generation.
        """
        metrics = Metrics()
        groups: dict[int, FinishedGroup] = {}  # by row
        start = time.monotonic()
        bar = progress("generating", len(prompts))
        with closing(self.open_stream(sampling)) as stream, bar as advance:
            stream.submit_all([((0, prompt.row_id), prompt) for prompt in prompts], tag=tag)
            while stream.num_running:
                for group in stream.finished(POLL_S):
                    groups[group.key[1]] = group
                    advance()
        end = time.monotonic()
        acted_at = stream.acted_at or end
        metrics.add("timing/generation", acted_at - start, reduction="sum")
        if stream.acted_at is not None:
            metrics.add("timing/reward", end - acted_at, reduction="sum")
        rollouts = [
            replace(rollout, group_id=group_id)
            for group_id, prompt in enumerate(prompts)
            for rollout in groups[prompt.row_id].rollouts
        ]
        check_scores(rollouts)
        failed = {row: group.failure for row, group in groups.items() if group.failure is not None}
        return SampleBatch(rollouts, metrics.merge(stream.take_metrics()), failed)


class SamplesGenerator(SampleSource):
    """Samples from engines, scored; all its streams share one event loop."""

    def __init__(
        self, pool: EnginePool, scorer: GroupScorer, tokenizer: Tokenizer, *, vocab_size: int
    ) -> None:
        self.pool = pool
        self.scorer = scorer
        # Tokenizers are not shared between threads.
        self.tokenizer = copy.deepcopy(tokenizer)
        self.vocab_size = vocab_size
        self.loop = LoopThread("rollouts")

    def open_stream(self, sampling: SamplingSettings) -> TaskStream:
        """Return a stream over the engines."""
        return EngineStream(self.pool, self.scorer, self.make_group, sampling, self.loop)

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
