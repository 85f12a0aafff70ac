"""From prompts to scored groups of samples: a coroutine for each prompt, on one event loop.

The synchronous step, dynamic sampling, asynchronous training, evaluation and batch inference all
drain a stream of them, on that loop.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from openrlhf.engines.base import SamplingSettings
from openrlhf.errors import RewardError
from openrlhf.rollout.scoring import GroupScorer, check_scores, score_metrics
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.progress import progress
from openrlhf.utils.rollout import PromptRecord, Rollout
from openrlhf.utils.threads import LoopThread, on_loop

GroupKey = tuple[int, int]  # (episode, row) of the ledger


@dataclass(frozen=True)
class RolloutRequest:
    """A prompt whose samples are wanted.

    Example: `RolloutRequest(prompt, SamplingSettings(num_samples=8), "step3/17", group_id=40)`
    """

    prompt: PromptRecord
    sampling: SamplingSettings
    name: str  # sample k of it is "<name>/<k>"
    group_id: int  # no other group of the stream has it
    metrics: Metrics = field(default_factory=Metrics)  # what is noted on the way


class SampleSource(Protocol):
    """Source of the samples of a prompt: one turn of an engine, or an agent's episodes."""

    in_rounds: bool  # prompts that are submitted together end together, others wait for them

    async def samples_of(self, request: RolloutRequest) -> list[Rollout]:
        """Return the samples; raises EngineError, or AgentError where an agent failed."""

    async def close(self) -> None:
        """End what was started for it."""


@dataclass(frozen=True)
class FinishedGroup:
    """Outcome of a submitted prompt.

    Example: `FinishedGroup((0, 17), failure="reward: ZeroDivisionError")`
    """

    key: GroupKey
    # Scored, sample by sample; an agent's episode may have several. Empty when the group failed.
    rollouts: list[Rollout] = field(default_factory=list)
    failure: str | None = None  # why its samples were dropped


@dataclass(frozen=True)
class SampleBatch:
    """The samples of a batch of prompts.

    Example: `SampleBatch(rollouts, metrics, failed={17: "reward: ZeroDivisionError"})`
    """

    rollouts: list[Rollout]  # scored, prompt by prompt
    metrics: Metrics
    failed: dict[int, str]  # row -> why its samples were dropped


class RolloutMaker:
    """Makes the scored rollouts of prompts; all its streams share one event loop."""

    def __init__(self, source: SampleSource, scorer: GroupScorer) -> None:
        self.source = source
        self.scorer = scorer
        self.sampled_at = 0.0  # time of the last samples
        self.loop = LoopThread("rollouts")

    async def rollout(self, request: RolloutRequest) -> list[Rollout]:
        """Return the scored samples of a prompt; raises RewardError where the group failed."""
        with self.scorer.expecting():
            samples = await self.source.samples_of(request)
        self.sampled_at = time.monotonic()
        return await self.scorer.score(samples, request.metrics)

    def close(self) -> None:
        """End the agents and the loop; nothing is sampled any more."""
        self.loop.run(self.source.close())
        self.loop.close()

    def open_stream(self, sampling: SamplingSettings) -> "GroupStream":
        """Return a stream of the samples of prompts."""
        return GroupStream(self, sampling)

    @on_loop
    async def generate_samples(
        self, prompts: Sequence[PromptRecord], sampling: SamplingSettings, *, tag: str
    ) -> SampleBatch:
        """Return the scored samples of each prompt, prompt by prompt; `tag` makes sample ids
        unique. For a thread that waits.
        """
        groups: dict[int, FinishedGroup] = {}  # by row
        bar = progress("generating", len(prompts))
        async with self.open_stream(sampling) as stream:
            stream.submit([((0, prompt.row_id), prompt) for prompt in prompts], tag=tag)
            with bar as advance:
                while stream.num_running:
                    group = await stream.next()
                    groups[group.key[1]] = group
                    advance()
            metrics = stream.timings().merge(stream.take_metrics())
        rollouts = [
            replace(rollout, group_id=group_id)
            for group_id, prompt in enumerate(prompts)
            for rollout in groups[prompt.row_id].rollouts
        ]
        failed = {row: group.failure for row, group in groups.items() if group.failure is not None}
        return SampleBatch(rollouts, metrics.merge(score_metrics(rollouts)), failed)


class GroupStream:
    """A bounded set of rollouts; all methods are called on the event loop of `maker`.

    Every submitted prompt comes out of `next` exactly once, unless an error ends the stream or it
    is closed. Groups come in the order in which they are finished, which depends on timing; what is
    in a group that has a seed does not, for a given engine.
    """

    def __init__(self, maker: RolloutMaker, sampling: SamplingSettings) -> None:
        self.num_running = 0  # submitted and not yet fetched
        self.in_rounds = maker.source.in_rounds
        self._maker = maker
        self._sampling = sampling
        self._opened_at = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._group_ids = itertools.count()
        self._last: list[Rollout] = []  # a sample of the last group, whose scores are compared
        self._out: asyncio.Queue[FinishedGroup | BaseException] = asyncio.Queue()
        self._metrics = Metrics()

    async def __aenter__(self) -> "GroupStream":
        return self

    async def __aexit__(self, *error: object) -> None:
        """Abandon what runs; wait until the engines have stopped it."""
        tasks = self._tasks.copy()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, prompts: Sequence[tuple[GroupKey, PromptRecord]], *, tag: str) -> None:
        """Start the samples of prompts, in order; of prompts that are sampled in rounds, start one
        round.

        Sample ids are "<tag>/<row>/<k>", rows counted from 1: a tag may not come twice with a row.
        """
        self.num_running += len(prompts)
        for key, prompt in prompts:
            sampling = self._sampling.for_part(prompt.row_id)
            request = RolloutRequest(
                prompt, sampling, f"{tag}/{prompt.row_id + 1}", next(self._group_ids)
            )
            task = asyncio.ensure_future(self._run(key, request))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def next(self) -> FinishedGroup:
        """Return the next group that is finished and scored.

        Raise EngineError, RewardError or AgentError where one ends the run; then nothing more comes
        out of the stream.
        """
        item = await self._out.get()
        if isinstance(item, BaseException):
            raise item
        self.num_running -= 1
        return item

    def take_metrics(self) -> Metrics:
        """Return the metrics of generation, rewards and agents since the last call."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics

    def timings(self) -> Metrics:
        """Return the seconds that generation took, and those that rewards took beyond it."""
        metrics, end = Metrics(), time.monotonic()
        sampled_at = max(self._maker.sampled_at, self._opened_at)
        metrics.add("timing/generation", sampled_at - self._opened_at, reduction="sum")
        metrics.add("timing/reward", end - sampled_at, reduction="sum")
        return metrics

    async def _run(self, key: GroupKey, request: RolloutRequest) -> None:
        drops = self._maker.scorer.policy.drops
        failure = None
        try:
            rollouts = await self._maker.rollout(request)
            check_scores([*self._last, *rollouts])
        except RewardError as error:
            if not drops:
                raise
            # How many may fail is up to whoever fetches them, and knows what a step is.
            rollouts, failure = [], str(error)
        finally:
            self._metrics.merge(request.metrics)
        self._last = rollouts[-1:] or self._last
        if drops:
            self._metrics.add("num_dropped_groups", int(failure is not None), reduction="sum")
        self._out.put_nowait(FinishedGroup(key, rollouts, failure))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._out.put_nowait(error)
