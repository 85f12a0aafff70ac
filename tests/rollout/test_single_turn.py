"""What an engine answers becomes samples, or an error that names the sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.errors import EngineError
from openrlhf.rollout.engine_pool import BatchSampler
from openrlhf.rollout.scoring import FailurePolicy, GroupScorer, SourceScorer
from openrlhf.utils.rollout import Rollout
from tests.rollout.stream_fakes import (
    HeldEngine,
    HeldSource,
    PromptTokenizer,
    fetch,
    open_stream,
    prompt,
    rollouts_of,
)

VOCAB_SIZE = 10
GOOD = Completion((3, 4), (-0.5, -0.7), "stop", weight_version=0)


class FixedEngine:
    """Answers every request with the same completions."""

    def __init__(self, completions: list[Completion]) -> None:
        self.completions = completions

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        return [self.completions for _ in requests]


def samples_of(*completions: Completion) -> list[Rollout]:
    """The samples that are made of the answer to one prompt."""
    rollouts = rollouts_of(
        [BatchSampler(FixedEngine([*completions]).generate)],
        GroupScorer(SourceScorer(HeldSource(), 4), FailurePolicy(4)),
        PromptTokenizer(),
        VOCAB_SIZE,
    )
    sampling = SamplingSettings(num_samples=2)
    return rollouts.generate_samples([prompt(0)], sampling, tag="t").rollouts


def test_tokens_and_log_probs_are_kept() -> None:
    edge = Completion((0, 9), (0.0, -80.0), "length", weight_version=0)
    first, second = samples_of(GOOD, edge)
    assert (first.sample_id, second.sample_id) == ("t/0/0", "t/0/1")
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert first.logprobs.tolist() == pytest.approx([-0.5, -0.7])
    assert second.token_ids.tolist() == [1, 2, 0, 9]
    assert second.logprobs.tolist() == [0, -80]


IMPOSSIBLE = [
    ((3, 4), (-0.5, None), "log-prob None at 1"),
    ((3, 4), (math.nan, -0.5), "log-prob nan at 0"),
    ((3, 4), (-0.5, math.inf), "log-prob inf at 1"),
    ((3, 4), (-0.5, -math.inf), "log-prob -inf at 1"),
    ((3, 4), (-0.5, 0.5), "log-prob 0.5 at 1"),
    ((3, 4), (-0.5,), "2 tokens but 1 log-probs"),
    ((3, 4), (), "2 tokens but 0 log-probs"),
    ((3,), (-0.5, -0.5), "1 tokens but 2 log-probs"),
    ((3, 10), (-0.5, -0.5), "token 10 at 1 is outside 0..9"),
    ((-1, 4), (-0.5, -0.5), "token -1 at 0 is outside 0..9"),
    ((), (), "the engine answered no token"),
]


@pytest.mark.parametrize(("token_ids", "logprobs", "said"), IMPOSSIBLE)
def test_an_impossible_answer_is_an_error(token_ids: tuple, logprobs: tuple, said: str) -> None:
    bad = Completion(token_ids, logprobs, "stop", weight_version=0)
    with pytest.raises(EngineError) as caught:
        samples_of(GOOD, bad)
    assert str(caught.value) == f"sample t/0/1: {said}"


def test_an_answer_with_too_few_samples_is_an_error() -> None:
    with pytest.raises(EngineError, match="request t/0: 1 completions, asked for 2"):
        samples_of(GOOD)


def test_an_impossible_answer_ends_a_stream() -> None:
    engine = HeldEngine()
    stream = open_stream([engine])
    try:
        stream.submit([((0, 0), prompt(0))], tag="t")
        bad = Completion((3, 4), (-0.5, math.nan), "stop", weight_version=0)
        engine.asked.pop("t/0")[1].set_result([GOOD, bad])
        with pytest.raises(EngineError, match="sample t/0/1: log-prob nan at 1"):
            fetch(stream, 1)
    finally:
        stream.close()
