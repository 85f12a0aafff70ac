"""Requests reach exactly one engine, or one of the policy's own ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.trainer.ray.vllm_engine import GroupGenerator


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(str(k), (k,), SamplingSettings()) for k in range(count)]


class EchoRanks:
    """Three ranks that answer each prompt with itself."""

    num_shares = 3

    def start(
        self, method: Callable[..., Any], shares: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        return lambda: [
            [[Completion(r.prompt_token_ids, (0.0,), "stop", 0)] for r in asked]
            for (asked,) in shares
        ]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_answers_come_in_the_order_of_the_requests(count: int) -> None:
    generator = GroupGenerator(EchoRanks(), len)  # type: ignore[arg-type]
    answers = generator.generate(requests(count))
    assert [answer.token_ids for [answer] in answers] == [(k,) for k in range(count)]
