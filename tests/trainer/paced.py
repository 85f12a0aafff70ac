"""Generation without a model: requests finish one after the other, evenly over a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.rewards.base import RewardSource
from openrlhf.rollout.engine_pool import EnginePool
from openrlhf.rollout.rollout import Rollouts
from openrlhf.rollout.scoring import FailurePolicy, GroupScorer, SourceScorer
from openrlhf.rollout.single_turn import SingleTurn


class PacedEngine:
    """Answers requests with the same two tokens, one after the other."""

    sample = VLLMEngine.sample

    def __init__(self, seconds: float) -> None:
        """`seconds`: for each request."""
        self.seconds = seconds
        self.thread = ThreadPoolExecutor(max_workers=1)

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
        """A future for each request."""
        return [self.thread.submit(self.answer, request) for request in requests]

    def answer(self, request: GenerationRequest) -> list[Completion]:
        """The samples of one request, after its time."""
        time.sleep(self.seconds)
        one = Completion((5, 1), (0.0, 0.0), "stop", weight_version=0)
        return [one] * request.sampling.num_samples

    def abort(self, futures: Iterable[Future[list[Completion]]]) -> None:
        """Every request is wanted."""
        raise AssertionError("nothing was cancelled")


@dataclass(frozen=True)
class Prompt:
    """What the generator reads of a prompt."""

    row_id: int
    prompt_token_ids: tuple[int, ...] = (3, 4)
    prompt_text: str = "p"
    label: object = None
    datasource: str = "default"
    columns: dict[str, object] = field(default_factory=dict)
    source: str = "p"


class Words:
    """A tokenizer that only writes."""

    def batch_decode(self, rows: Sequence[object], **options: object) -> list[str]:
        """The same text for every row."""
        return ["text"] * len(rows)


def step_seconds(
    engines: Sequence[PacedEngine],
    source: RewardSource,
    prompts: Sequence[Prompt],
    sampling: SamplingSettings,
    *,
    batch_size: int,
) -> float:
    """How long generation and reward of one step take; every sample must come out once."""
    scorer = GroupScorer(SourceScorer(source, batch_size), FailurePolicy(len(prompts)))
    turns = SingleTurn(EnginePool(engines), Words(), vocab_size=10**6)  # type: ignore[arg-type]
    rollouts = Rollouts(turns, scorer)
    start = time.monotonic()
    batch = rollouts.generate_samples(prompts, sampling, tag="t")  # type: ignore[arg-type]
    seconds = time.monotonic() - start
    expected = [prompt.row_id for prompt in prompts for _ in range(sampling.num_samples)]
    assert [rollout.row_id for rollout in batch.rollouts] == expected
    return seconds
