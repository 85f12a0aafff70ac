"""Several engines answer as one, and a terminal sees how far they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.trainer.ray import vllm_engine
from openrlhf.trainer.ray.vllm_engine import EnginePool


def requests(count: int, num_samples: int = 1) -> list[GenerationRequest]:
    sampling = SamplingSettings(num_samples=num_samples)
    return [GenerationRequest(str(k), (k,), sampling) for k in range(count)]


class EchoEngine:
    """Answers each prompt with itself; finishes when it is allowed to."""

    def __init__(self) -> None:
        self.may_finish = threading.Event()
        self.num_done = 40  # of earlier calls

    def generate(self, asked: Sequence[GenerationRequest]) -> list[list[Completion]]:
        assert self.may_finish.wait(10)
        return [
            [Completion(r.prompt_token_ids, (0.0,), "stop", weight_version=0)]
            * r.sampling.num_samples
            for r in asked
        ]

    def num_samples_done(self) -> int:
        return self.num_done


def free_engines(count: int) -> list[EchoEngine]:
    engines = [EchoEngine() for _ in range(count)]
    for engine in engines:
        engine.may_finish.set()
    return engines


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_answers_come_in_the_order_of_the_requests(count: int) -> None:
    answers = EnginePool(free_engines(3)).generate(requests(count))
    assert [answer.token_ids for [answer] in answers] == [(k,) for k in range(count)]


class HalfReadyEngine(EchoEngine):
    """Answers even prompts at once, the others when it is allowed to."""

    def submit(self, asked: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
        futures: list[Future[list[Completion]]] = [Future() for _ in asked]

        def answer(k: int) -> None:
            futures[k].set_result([Completion(asked[k].prompt_token_ids, (0.0,), "stop", 0)])

        def finish() -> None:
            assert self.may_finish.wait(10)
            for k in range(1, len(asked), 2):
                answer(k)

        for k in range(0, len(asked), 2):
            answer(k)
        threading.Thread(target=finish).start()
        return futures


def test_groups_are_brought_as_they_come_with_their_positions() -> None:
    engines = [HalfReadyEngine(), HalfReadyEngine()]
    came: list[tuple[int, int]] = []

    def on_group(position: int, answer: list[Completion]) -> None:
        came.append((position, answer[0].token_ids[0]))
        if len(came) == 4:  # positions 0 and 4 of one engine, 1 and 5 of the other
            for engine in engines:
                engine.may_finish.set()

    answers = EnginePool(engines).generate(requests(8), on_group)
    assert sorted(came[:4]) == [(0, 0), (1, 1), (4, 4), (5, 5)]
    assert sorted(came) == [(k, k) for k in range(8)]
    assert [answer.token_ids for [answer] in answers] == [(k,) for k in range(8)]


def test_an_engine_that_cannot_bring_groups_early_brings_them_at_the_end() -> None:
    came: list[int] = []
    EnginePool(free_engines(2)).generate(requests(5), lambda k, answer: came.append(k))
    assert sorted(came) == [0, 1, 2, 3, 4]


def test_an_error_of_one_engine_ends_the_call_after_what_the_other_brought() -> None:
    class BrokenEngine(EchoEngine):
        def submit(self, asked: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
            raise RuntimeError("out of memory")

    came: list[int] = []
    with pytest.raises(RuntimeError, match="out of memory"):
        EnginePool([*free_engines(1), BrokenEngine()]).generate(
            requests(4), lambda k, answer: came.append(k)
        )
    assert sorted(came) == [0, 2]


def test_a_terminal_sees_samples_done_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [EchoEngine(), EchoEngine()]
    shown: list[tuple[int, int]] = []

    def show(num_done: int, total: int) -> None:
        shown.append((num_done, total))
        if len(shown) == 1:
            engines[0].num_done += 3
        else:
            for engine in engines:
                engine.may_finish.set()

    @contextmanager
    def counter(description: str) -> Iterator[object]:
        yield show

    monkeypatch.setattr(vllm_engine, "is_terminal", lambda: True)
    monkeypatch.setattr(vllm_engine, "counter", counter)
    monkeypatch.setattr(vllm_engine, "POLL_S", 0.01)
    EnginePool(engines).generate(requests(4, num_samples=2))
    assert shown[:2] == [(0, 8), (3, 8)]


def test_nobody_is_asked_how_far_it_is_without_a_terminal() -> None:
    [engine] = free_engines(1)
    engine.num_samples_done = None  # type: ignore[method-assign, assignment]
    assert len(EnginePool([engine]).generate(requests(2))) == 2


def test_an_error_of_an_engine_comes_through_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenEngine(EchoEngine):
        def generate(self, asked: Sequence[GenerationRequest]) -> list[list[Completion]]:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(vllm_engine, "is_terminal", lambda: True)
    with pytest.raises(RuntimeError, match="out of memory"):
        EnginePool([BrokenEngine()]).generate(requests(1))
