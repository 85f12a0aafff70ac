"""New engines in place of lost ones: started, given the weights, then used; as often as allowed."""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from openrlhf.engines.base import GenerationRequest, SamplingSettings
from openrlhf.errors import EngineError, LostEngineError, LostRankError, NoRestartError
from openrlhf.trainer.ray import launcher, restarts
from openrlhf.trainer.ray.recovery import EngineRecovery
from openrlhf.trainer.ray.restarts import Restarts
from openrlhf.trainer.ray.vllm_engine import RayEngine
from openrlhf.utils import progress
from tests.helpers.processes import wait_until


class Engine(RayEngine):
    """Notes what happens to it; its first starts may fail."""

    def begin(self, events: list[str], num_failures: int = 0) -> "Engine":
        self.events, self.num_failures = events, num_failures
        self.may_start = threading.Event()
        self.may_start.set()
        return self

    def restart(self) -> None:
        self.handle, self.num_starts = object(), self.num_starts + 1
        self.events.append("started")

    def ready_again(self) -> None:
        self.may_start.wait(10)
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


def let_it_be_used(engine: RayEngine) -> None:
    engine.is_lost = False


def test_a_new_engine_has_its_weights_before_it_is_used(capsys: pytest.CaptureFixture) -> None:
    engine, events, started_again = started(num_failures=1)
    room = threading.RLock()

    def update(updated: RayEngine) -> None:
        assert updated is engine and not engine.is_up
        events.append("weights")
        engine.is_lost = False

    started_again.prepare(room, update)
    engine.lose(DEAD)
    wait_until(lambda: engine.is_up)
    # The one that did not start is ended at once, before the pause: it may hold memory.
    assert events == ["killed", "started", "killed", "started", "weights"]
    said = " ".join(capsys.readouterr().err.split())
    assert f"{DEAD}; a new one starts in its place: restart 1 of 3 within an hour" in said
    assert "pid 8 was killed by SIGKILL; a new one starts in its place: restart 2 of 3" in said


def test_an_engine_that_does_not_start_again_is_named_until_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(progress, "SAY_AFTER_S", 0.1)
    engine, _, _ = started()
    engine.log = "run/logs/vllm-0"
    engine.ready_again = lambda: time.sleep(0.3)  # type: ignore[method-assign]
    engine.lose(DEAD)
    wait_until(lambda: engine.is_up)
    assert "for vllm-0 to start again: see run/logs/vllm-0*" in capsys.readouterr().out


def test_an_engine_that_takes_no_weights_is_named_with_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "vllm-0.log").write_text("NCCL error\n")
    lost: list[str] = []
    engine = RayEngine("vllm-0", f"{tmp_path}/vllm-0", on_lost=lambda _, why: lost.append(str(why)))
    why = f"vllm-0 took no weights for 300 s. The end of {tmp_path}/vllm-0.log: NCCL error"
    engine.lose(LostEngineError("vllm-0 took no weights for 300 s"))
    engine.lose(LostEngineError(why))
    assert lost == [why, why]


def test_a_loss_is_counted_once_whoever_sees_it() -> None:
    engine, events, _ = started()
    old = engine.handle
    engine.may_start.clear()
    for _ in range(3):
        engine.lose(DEAD, actor=old)
    engine.may_start.set()
    wait_until(lambda: engine.is_up)
    engine.lose(DEAD, actor=old)  # seen late: it is another one's death
    assert engine.is_up and events == ["killed", "started"]


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


def test_the_prompts_that_every_lost_engine_was_at_work_on_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now[0])
    engine, _, _ = started(most=2)
    engine.requests = dict(enumerate(["step1/7", "step1/18", "step1/20/0/1"]))
    for number in range(2):
        now[0] += 100
        engine.lose(DEAD)
        wait_until(lambda: engine.is_up)
        engine.requests = dict(enumerate([f"step{number + 2}/18", "step2/9", "step2/20"]))
    now[0] += 100
    engine.lose(DEAD)
    with pytest.raises(
        EngineError, match=r"\(--max_restarts\)\. Each .* at work on row\(s\) 18, 20\.$"
    ):
        wait_until(lambda: engine.is_up and False)


def test_an_engine_knows_the_requests_that_it_is_at_work_on() -> None:
    class Asked(RayEngine):
        async def _sample(self, request: Any) -> Any:
            return [*self.requests.values()]

    engine = Asked("vllm-0", handle=object())
    asked = GenerationRequest("step1/7", (1, 2), SamplingSettings())
    assert asyncio.run(engine.sample(asked)) == ["step1/7"]
    assert not engine.requests


def test_engines_that_are_lost_together_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a node, and what Ray starts there before it knows that the node is gone; one that
    is lost again in the same minute counts again.
    """
    now = [0.0]
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now[0])
    budget = Restarts(2)
    for number in range(4):
        now[0] += 5
        said = budget.note("vllm", DEAD, who=f"vllm-{number}")
        assert said.startswith("restart 1 of 2")
    never_ran = LostEngineError("vllm-0 died: The actor never ran - it was cancelled")
    assert budget.note("vllm", never_ran, who="vllm-0").startswith("restart 1 of 2")
    assert budget.note("vllm", DEAD, who="vllm-0").startswith("restart 2 of 2")
    assert budget.num_losses == 2
    with pytest.raises(EngineError, match="It is not started again"):
        budget.note("vllm", DEAD, who="vllm-0")


def test_an_engine_leaves_shared_devices_to_ranks_that_it_waits_for() -> None:
    engine, events, started_again = started()
    engine.call = lambda method, *args: events.append(  # type: ignore[method-assign]
        " ".join([method.__name__, *args])
    )
    has_trainer = threading.Event()

    def update(updated: RayEngine) -> None:
        if not has_trainer.is_set():
            updated.waits_for = LostRankError("actor rank 0 died")
            raise updated.waits_for
        events.append("weights")
        updated.is_lost = False

    started_again.prepare(threading.Lock(), update, sleeps=True)
    engine.lose(DEAD)
    wait_until(lambda: events[-1] == "sleep")
    has_trainer.set()
    engine.waits_for = None
    wait_until(lambda: engine.is_up)
    wakes = ["wake_up weights", "wake_up kv_cache"]
    assert events == ["killed", "started", "sleep", *wakes, "weights"]


def test_an_engine_that_is_lost_again_as_it_is_used_stays_lost() -> None:
    engine, events, started_again = started()

    def update(updated: RayEngine) -> None:
        updated.is_lost = False
        if events.count("started") == 1:
            engine.may_start.clear()
            engine.lose(DEAD)

    started_again.prepare(threading.Lock(), update)
    engine.lose(DEAD)
    wait_until(lambda: len(started_again._threads) == 2)
    started_again._threads[0].join(1)
    assert not engine.is_up
    engine.may_start.set()
    wait_until(lambda: engine.is_up)
    assert events.count("started") == 2


def test_an_engine_that_is_not_started_again_raises_where_it_is_asked_for() -> None:
    engine, events, _ = started(most=0)
    engine.lose(DEAD)
    with pytest.raises(EngineError, match="0 restart"):
        wait_until(lambda: engine.is_up and False)
    assert events == ["killed"]  # it may hang, and be waited for


def test_the_run_ends_after_one_wait_where_no_node_has_room_for_an_engine() -> None:
    engine, events, _ = started()

    def ready_again() -> None:
        raise NoRestartError("vllm-0 was on a node that is gone")

    engine.ready_again = ready_again  # type: ignore[method-assign]
    engine.lose(DEAD)
    with pytest.raises(EngineError, match=r"^vllm-0 was on a node that is gone$"):
        wait_until(lambda: engine.is_up and False)
    assert events == ["killed", "started"]


def test_an_engine_that_hangs_is_ended_before_there_is_room_for_another() -> None:
    engine, events, started_again = started()
    room = threading.Lock()
    started_again.prepare(room, let_it_be_used)
    with room:  # of somebody who waits for the engine
        engine.lose(DEAD)
        wait_until(lambda: bool(events))
        assert events == ["killed"] and not engine.is_up
    wait_until(lambda: engine.is_up)


def test_nothing_is_started_once_the_run_ends() -> None:
    engine, events, started_again = started()
    started_again.close()
    engine.lose(DEAD)
    assert events == ["killed"]


def test_an_engine_that_starts_while_the_run_ends_is_ended_and_asked_no_more() -> None:
    engine, events, started_again = started(num_failures=1)
    engine.may_start.clear()
    engine.lose(DEAD)
    wait_until(lambda: "started" in events)
    kill, engine.kill = engine.kill, lambda: (kill(), engine.may_start.set())  # type: ignore[method-assign, func-returns-value]
    started_again.close()
    assert events[:3] == ["killed", "started", "killed"] and "started" not in events[3:]
    assert not started_again._threads[0].is_alive()
    with pytest.raises(EngineError, match="ended with the run"):
        _ = engine.is_up


def test_an_engine_that_waits_for_room_while_the_run_ends_is_not_started() -> None:
    engine, events, started_again = started()
    room = threading.Lock()
    started_again.prepare(room, let_it_be_used)
    room.acquire()
    engine.lose(DEAD)
    wait_until(lambda: bool(events))
    threading.Timer(0.2, room.release).start()
    started_again.close()
    assert events == ["killed", "killed"] and not started_again._threads[0].is_alive()


def test_an_engine_that_hangs_while_it_loads_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: object, timeout: float) -> None:
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(launcher.ray, "get", get)
    placed: list[object] = []
    ready = SimpleNamespace(remote=lambda method: method)
    engine = RayEngine("vllm-0", wait_placed=placed.append, restart_timeout_s=900.0)
    engine.handle = SimpleNamespace(run=ready)
    with pytest.raises(LostEngineError, match="vllm-0 did not respond in 900 s"):
        engine.ready_again()
    assert placed == [engine.handle]
