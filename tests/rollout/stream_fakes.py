"""What streams of groups are tested with: engines and scorers whose answers the test brings."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.rewards.base import RewardBatch, RewardResult, Shown
from openrlhf.rollout.engine_pool import BatchedEngine, EnginePool, SamplingEngine
from openrlhf.rollout.rollout import FinishedGroup, RolloutMaker
from openrlhf.rollout.scoring import FailurePolicy, GroupScorer, Scorer, SourceScorer
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import PromptRecord
from openrlhf.utils.threads import errors_to, on_loop

DEADLINE_S = 20.0


def stopped() -> Future[None]:
    """What an engine returns that has stopped sampling."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


class HeldEngine:
    """Takes requests and answers them when the test says so, each with its prompt's ids."""

    sample, _sample = VLLMEngine.sample, VLLMEngine._sample

    def __init__(self) -> None:
        self.asked: dict[str, tuple[GenerationRequest, Future[list[Completion]]]] = {}
        self.num_taken = 0
        self.aborted: list[str] = []
        self.error: Exception | None = None

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
        if self.error is not None:
            raise self.error
        futures: list[Future[list[Completion]]] = [Future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            self.asked[request.request_id] = (request, future)
            self.num_taken += 1
        return futures

    def abort(self, futures: Iterable[Future[list[Completion]]]) -> Future[None]:
        unwanted = set(futures)
        for name, (_, future) in self.asked.items():
            if future in unwanted and future.cancel():
                self.aborted.append(name)
        return stopped()

    def answer(self, name: str, version_starts: tuple[tuple[int, int], ...] = ()) -> None:
        request, future = self.asked.pop(name)
        ids = request.prompt_token_ids
        one = Completion(ids, (-0.5,) * len(ids), "stop", 3, version_starts)
        future.set_result([one] * request.sampling.num_samples)

    def fail(self, name: str, error: Exception) -> None:
        self.asked.pop(name)[1].set_exception(error)


class PromptTokenizer:
    """Decodes ids as they are."""

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": []}

    def batch_decode(self, rows: Iterable[torch.Tensor], **options: object) -> list[str]:
        return [" ".join(str(int(i)) for i in row) for row in rows]


@dataclass
class HeldSource:
    """Scores 1 for everything, at once or when the test says so; notes the batches."""

    is_held: bool = False
    answers: Callable[[RewardBatch], RewardResult] | None = None
    batches: list[list[str]] = field(default_factory=list)
    held: list[tuple[RewardBatch, Future[RewardResult]]] = field(default_factory=list)
    has_capacity = False

    name = "rewards"

    async def shown(self, batch: RewardBatch) -> Shown:
        return {}

    async def score(self, batch: RewardBatch) -> RewardResult:
        self.batches.append(list(batch.sample_ids))
        self.held.append((batch, Future()))
        future = self.held[-1][1]
        if not self.is_held:
            self.release()
        return await asyncio.wrap_future(future)

    def release(self) -> None:
        """Answer the oldest batch."""
        batch, future = self.held.pop(0)
        with errors_to(future.set_exception):
            future.set_result(self._answer(batch))

    def _answer(self, batch: RewardBatch) -> RewardResult:
        return self.answers(batch) if self.answers else RewardResult([1.0] * len(batch))

    def close(self) -> None: ...


def engine_of(engine: Any) -> SamplingEngine:
    """An engine that takes requests while it runs, or that samples batches."""
    return engine if hasattr(engine, "sample") else BatchedEngine(engine.generate)


def prompt(row: int) -> PromptRecord:
    return PromptRecord(row, f"prompt {row}", (row + 1, row + 2), label=row, columns={})


def rollouts_of(
    engines: Sequence[Any], scorer: GroupScorer, tokenizer: Any, vocab_size: int = 1000
) -> RolloutMaker:
    """Single turns on these engines."""
    return RolloutMaker(EnginePool(engines, tokenizer, vocab_size=vocab_size), scorer)


class DrivenStream:
    """A stream that a test drives from its own thread."""

    def __init__(
        self, rollouts: RolloutMaker, sampling: SamplingSettings, *, ends_loop: bool = False
    ) -> None:
        self.loop = rollouts.loop
        self.ends_loop = ends_loop
        self.scorer = rollouts.scorer
        self._stream = rollouts.open_stream(sampling)

    @property
    def num_running(self) -> int:
        return self._stream.num_running

    @on_loop
    async def submit(self, prompts: Sequence[Any], tag: str = "t") -> None:
        self._stream.submit(prompts, tag=tag)
        await asyncio.sleep(0)  # until the engines have been asked

    @on_loop
    async def finished(self, wait_s: float) -> list[FinishedGroup]:
        """What comes in this time, from the first that comes on; nothing where nothing runs."""
        groups: list[FinishedGroup] = []
        while self._stream.num_running:
            try:
                groups.append(await asyncio.wait_for(self._stream.next(), wait_s))
            except TimeoutError:
                break
            wait_s = 0.0
        return groups

    @on_loop
    async def take_metrics(self) -> Metrics:
        return self._stream.take_metrics()

    def close(self) -> None:
        if self.loop.is_running:
            self.loop.run(self._stream.__aexit__())
        if self.ends_loop:
            self.loop.close()


def open_stream(
    engines: Sequence[HeldEngine],
    source: HeldSource | Scorer | None = None,
    *,
    policy: FailurePolicy | None = None,
    batch_size: int = 4,
    num_samples: int = 2,
) -> DrivenStream:
    """The stream of a samples generator over these engines."""
    source = HeldSource() if source is None else source
    scorer = SourceScorer(source, batch_size) if isinstance(source, HeldSource) else source
    rollouts = rollouts_of(
        [engine_of(engine) for engine in engines],
        GroupScorer(scorer, policy or FailurePolicy(4)),
        PromptTokenizer(),
    )
    return DrivenStream(rollouts, SamplingSettings(num_samples=num_samples), ends_loop=True)


def submit(stream: DrivenStream, rows: Iterable[int]) -> None:
    stream.submit([((0, row), prompt(row)) for row in rows], tag="t")


def fetch(stream: DrivenStream, count: int) -> list[FinishedGroup]:
    """That many groups; fails when they do not come."""
    groups: list[FinishedGroup] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(groups) < count:
        assert time.monotonic() < deadline, f"only {len(groups)} of {count} came"
        groups += stream.finished(0.5)
    assert len(groups) == count
    return groups


def until(is_so: Callable[[], object]) -> None:
    """Wait for something that threads bring about."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.002)
