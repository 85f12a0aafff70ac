"""New engines in place of lost ones: started, given the weights, then used; as often as allowed."""

import threading
from typing import Any

import pytest

from openrlhf.errors import EngineError, LostEngineError
from openrlhf.trainer.ray import restarts
from openrlhf.trainer.ray.recovery import EngineRecovery
from openrlhf.trainer.ray.restarts import Restarts
from openrlhf.trainer.ray.vllm_engine import RayEngine
from tests.helpers.processes import wait_until


class Engine(RayEngine):
    """Notes what happens to it; its first starts may fail."""

    def begin(self, events: list[str], num_failures: int = 0) -> "Engine":
        self.events, self.num_failures = events, num_failures
        self.may_start = threading.Event()
        self.may_start.set()
        return self

    def restart(self) -> None:
        self.may_start.wait(10)
        self.handle, self.num_starts = object(), self.num_starts + 1
        self.events.append("started")
        if self.num_failures > 0:
            self.num_failures -= 1
            raise LostEngineError("vllm-0 died: pid 8 was killed by SIGKILL")

    def kill(self) -> None:
        self.events.append("killed")


DEAD = LostEngineError("vllm-0 died: pid 7 was killed by SIGKILL")


def started(most: int = 3, **more: Any) -> tuple[Engine, list[str], EngineRecovery]:
    events: list[str] = []
    engine = Engine("vllm-0", handle=object()).begin(events, **more)
    return engine, events, EngineRecovery([engine], Restarts(most))


def test_a_new_engine_has_its_weights_before_it_is_used(capsys: pytest.CaptureFixture) -> None:
    engine, events, started_again = started(num_failures=1)
    room = threading.RLock()

    def update(updated: RayEngine) -> None:
        assert updated is engine and not engine.is_up
        events.append("weights")

    started_again.prepare(room, update)
    engine.lose(DEAD)
    wait_until(lambda: engine.is_up)
    assert events == ["started", "started", "weights"]
    said = " ".join(capsys.readouterr().err.split())
    assert f"{DEAD}; a new one starts in its place: restart 1 of 3 within an hour" in said
    assert "pid 8 was killed by SIGKILL; a new one starts in its place: restart 2 of 3" in said


def test_a_loss_is_counted_once_whoever_sees_it() -> None:
    engine, events, _ = started()
    old = engine.handle
    engine.may_start.clear()
    for _ in range(3):
        engine.lose(DEAD, actor=old)
    engine.may_start.set()
    wait_until(lambda: engine.is_up)
    engine.lose(DEAD, actor=old)  # seen late: it is another one's death
    assert engine.is_up and events == ["started"]


def test_beyond_the_restarts_of_an_hour_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now[0])
    budget = Restarts(2)
    budget.note("vllm", DEAD)
    now[0] = 1800
    budget.note("vllm", DEAD)
    budget.note("actor", DEAD)  # has a budget of its own
    with pytest.raises(
        EngineError, match=r"SIGKILL. It is not started again: 2 restart\(s\) of vllm"
    ):
        budget.note("vllm", DEAD)
    now[0] = 3700
    assert budget.note("vllm", DEAD).startswith("restart 2 of 2")


def test_an_engine_that_is_not_started_again_raises_where_it_is_asked_for() -> None:
    engine, events, _ = started(most=0)
    engine.lose(DEAD)
    with pytest.raises(EngineError, match="0 restart"):
        wait_until(lambda: engine.is_up and False)
    assert events == []


def test_nothing_is_started_once_the_run_ends() -> None:
    engine, events, started_again = started()
    started_again.close()
    engine.lose(DEAD)
    assert events == ["killed"]
