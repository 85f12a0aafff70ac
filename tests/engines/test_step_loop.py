"""The loop serves while it takes commands, and an error reaches everybody who waits."""

from __future__ import annotations

import threading

import pytest

from openrlhf.engines.step_loop import StepLoop
from openrlhf.errors import EngineError


class Countdown:
    """Answers n after n steps; a negative request breaks the step, "bad" is refused."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.wanted: dict[str, int] = {}
        self.threads: set[str] = set()

    def add(self, key, request):
        if request == "bad":
            raise ValueError("not a number")
        self.left[key] = self.wanted[key] = request

    def step(self):
        self.threads.add(threading.current_thread().name)
        if any(n < 0 for n in self.left.values()):
            raise RuntimeError("boom")
        for key in self.left:
            self.left[key] -= 1
        done = [key for key, n in self.left.items() if n <= 0]
        for key in done:
            del self.left[key]
        return [(key, self.wanted[key]) for key in done]

    def has_work(self):
        return bool(self.left)

    def abort(self, keys):
        for key in keys:
            self.left.pop(key, None)


@pytest.fixture
def loop():
    loop = StepLoop(Countdown, "counter")
    yield loop
    loop.close()


def test_many_threads_are_served_by_one(loop):
    answers = {}

    def run(k: int) -> None:
        answers[k] = [future.result(5) for future in loop.submit([k, 2 * k])]

    threads = [threading.Thread(target=run, args=(k,)) for k in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {k: [k, 2 * k] for k in range(1, 9)}
    assert loop.stepper.threads == {"counter"}


def test_a_bad_request_fails_alone(loop):
    bad, good = loop.submit(["bad", 3])
    assert good.result(5) == 3
    with pytest.raises(EngineError, match="counter refused a request: not a number"):
        bad.result(5)


def test_an_error_of_a_step_reaches_every_waiting_and_later_call(loop):
    futures = loop.submit([10**9, -1])
    for future in futures:
        with pytest.raises(EngineError, match="counter is down: boom"):
            future.result(5)
    with pytest.raises(EngineError, match="counter is down: boom"):
        loop.submit([1])
    with pytest.raises(EngineError, match="counter is down: boom"):
        loop.call(lambda: None)


def test_a_request_that_nobody_waits_for_is_forgotten(loop):
    unwanted, wanted, done = loop.submit([10**9, 200, 1])
    assert done.result(5) == 1
    loop.abort([unwanted, done])
    assert wanted.result(5) == 200
    assert not loop.call(lambda: loop.stepper.left)
    assert unwanted.cancelled() and not done.cancelled()
    loop.close()
    loop.abort([wanted])  # there is nothing left to forget
