"""Who counts as not getting on, and who is ended for it."""

import asyncio
import re
import threading
from array import array
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from openrlhf.config.ppo import PPOConfig
from openrlhf.engines.base import Beginning, Completion, GenerationRequest, SamplingSettings
from openrlhf.errors import EngineError, LostEngineError, LostRankError
from openrlhf.trainer.ray import launcher, vllm_engine, watch
from openrlhf.trainer.ray.vllm_engine import LLMRayActor, RayEngine
from openrlhf.trainer.ray.watch import Watch, Watched, WatchedEngine, WatchedRank
from openrlhf.trainer.workers.model_worker import TrainedWorker
from openrlhf.trainer.workers.policy import PolicyModelActor
from openrlhf.utils.progress import Health


def watched(who: str = "actor rank 0", deadline_s: float = 600.0) -> Watched:
    return Watched(who, who, deadline_s, "--rank_timeout_s")


def test_one_that_does_not_answer_or_stays_at_a_micro_batch_is_quiet():
    rank = watched()
    rank.hear(None, 2.0)
    assert rank.quiet.seconds == 2.0
    for health, quiet_s in (
        (Health(None, 0, None, 7), 0.0),
        (Health(None, 0, None, 7), 0.0),  # idle
        (Health("updating the policy", 0, None, 7), 0.0),  # has just begun
        (Health("updating the policy", 0, None, 7), 2.0),
        (None, 4.0),
        (Health("updating the policy", 1, None, 7), 0.0),
        (Health("updating the policy", 1, None, 7), 2.0),
    ):
        rank.hear(health, 2.0)
        assert rank.quiet.seconds == quiet_s
    expected = "actor rank 0 (pid 7) has not got on for 2 s while updating the policy"
    assert rank.describe() == expected
    rank.hear(None, 20.0)
    expected = "actor rank 0 (pid 7) has not responded for 22 s while updating the policy"
    assert rank.describe() == expected


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    handles: list[object] = []
    monkeypatch.setattr(watch.ray, "kill", handles.append)
    return handles


def test_a_rank_that_waits_for_a_stopped_one_is_not_the_one_that_is_ended(killed):
    waiting, stopped, idle = watched("rank 0"), watched("rank 1"), watched("engine")
    busy = Health("updating the policy", 3, None, 7)
    for rank in (waiting, stopped):
        rank.hear(busy, 0.0)
    for _ in range(300):
        waiting.hear(busy, 2.0)
        stopped.hear(None, 1.9)
        idle.hear(Health(None, 3, None, 7), 2.0)
    run = Watch([waiting, stopped, idle])
    run._judge()
    assert killed == ["rank 1"]
    assert "rank 1 (pid 7) has not responded for 570 s" in str(run.failure)


def test_a_process_that_pauses_is_not_the_one_that_is_ended_for_one_that_hangs(killed):
    hanging, paused = watched("rank 0"), watched("engine")
    hanging.hear(busy := Health("updating the policy", 3, None, 7), 0.0)
    for _ in range(300):
        hanging.hear(busy, 2.0)
    for _ in range(3):
        paused.hear(None, 2.0)
    run = Watch([hanging, paused])
    run._judge()
    assert killed == ["rank 0"]
    assert "rank 0 (pid 7) has not got on for 600 s" in str(run.failure)


DEATH = (
    "The actor died unexpectedly before finishing this task.\n\tpid: 719\nWorker "
    "unexpectedly exits with a connection error code 2. End of file."
)
BY_US = "The actor is dead because it was killed by `ray.kill`."


@pytest.fixture
def group(killed: list[object], monkeypatch: pytest.MonkeyPatch) -> launcher.RayActorGroup:
    monkeypatch.setattr(launcher, "start_actor", lambda *_: object())
    return launcher.RayActorGroup(
        TrainedWorker, PPOConfig(), [{}, {}], role="ref", run_dir="no/run"
    )


def test_a_rank_that_dies_while_its_model_is_idle_is_said_once_and_later_in_the_same_words(
    group, capsys
):
    rank = WatchedRank(group, 0, 600.0)
    for text in (DEATH, DEATH):
        assert rank.note_death(text)
    why = "ref rank 0 of 2 died: pid 719 ended without a word (SIGKILL, or an exit of native code)"
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"warning: {why}; the run goes on until it waits for ref."
    later = group._lost_rank([1, 2], 0, LostRankError(f"ref rank 0 of 2 died: {BY_US}"))
    assert str(later) == why


def test_an_idle_rank_that_is_ended_because_it_hangs_is_said_once(group, killed, capsys):
    rank = WatchedRank(group, 0, 600.0)
    why = "ref rank 0 of 2 has not responded for 600 s, and was ended"
    assert rank.end(EngineError(why)) is None
    assert rank.note_death(BY_US)
    assert killed == [rank.handle]
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"warning: {why}; the run goes on until it waits for ref."


def test_a_rank_that_dies_while_it_is_waited_for_is_left_to_whoever_waits(
    group, capsys, monkeypatch
):
    rank = WatchedRank(group, 0, 600.0)

    def wait(references: list[int], **_: object) -> tuple[list[int], list[int]]:
        rank.note_death(DEATH)
        return references[:1], references[1:]

    def get(reference: int, timeout: float) -> None:
        raise ray.exceptions.ActorUnavailableError(DEATH, None)

    monkeypatch.setattr(launcher.ray, "wait", wait)
    monkeypatch.setattr(launcher.ray, "get", get)
    with pytest.raises(LostRankError, match="pid 719 ended without a word"):
        group._wait([1, 2])
    rank.note_death(DEATH)
    assert capsys.readouterr().err == ""


def test_a_process_that_ray_cannot_reach_for_a_moment_has_not_died():
    class Unreachable(Watched):
        def ask(self, seconds: float) -> None:
            raise ray.exceptions.ActorUnavailableError("RPC error", None)

    rank = Unreachable("actor rank 0", "rank", 600.0, "--rank_timeout_s")
    run = Watch([rank])
    run._ask_all(2.0)
    assert run._watched == [rank] and rank.quiet.seconds == 2.0


def test_a_rank_that_was_ended_does_not_keep_others_from_being_judged(killed):
    group = SimpleNamespace(handles=["rank"], logs="", who=lambda rank: "ref rank 0", ended=[])
    group.end_rank = lambda rank, handle, why: group.ended.append(handle)
    rank, engine = WatchedRank(group, 0, 30.0), watched("engine", 30.0)
    rank.quiet.add(31.0)
    rank.is_responding = False
    run = Watch([rank, engine])
    run._judge()
    engine.hear(None, 31.0)
    run._judge()
    assert group.ended == ["rank"] and killed == ["engine"]


def test_a_quiet_one_is_said_after_twenty_seconds_then_after_twice_as_long(killed, capsys):
    rank = watched()
    run = Watch([rank])
    for _ in range(45):
        rank.hear(None, 1.0)
        run._judge()
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" for ")[2][:4] for line in said] == ["20 s", "40 s"]
    assert "the run ends after 600 s (--rank_timeout_s)" in said[0]
    assert not killed


def test_an_error_that_nobody_expects_does_not_end_the_watch(killed, monkeypatch, capsys) -> None:
    class Odd(Watched):
        num_asked = 0

        def ask(self, seconds: float) -> None:
            self.num_asked += 1
            if self.num_asked < 3:
                raise ValueError("half an answer")
            self.hear(None, 600.0)

    for name in ("ASK_EVERY_S", "LOOK_EVERY_S"):
        monkeypatch.setattr(watch, name, 0.01)
    run = Watch([Odd("rank 0", "rank 0", 600.0, "--rank_timeout_s")])
    run._run()
    assert killed == ["rank 0"] and "rank 0 has not responded for 600 s" in str(run.failure)
    assert capsys.readouterr().err.count("warning: the watch of processes failed") == 1


class Stuck:
    """A worker that hangs in a call."""

    def run(self, method: str) -> None:
        begun.set()
        freed.wait(60)


def test_a_rank_says_in_which_calls_it_hangs() -> None:
    rank = launcher.RankActor(Stuck)
    begun.clear()
    freed.clear()
    thread = threading.Thread(target=rank.run, args=("fit",))
    thread.start()
    begun.wait(60)
    assert re.search(r"wait \(threading.py:\d+\) < run \(test_watch.py:\d+\) < run", rank.where())
    freed.set()
    thread.join()
    assert rank.where() == ""


def test_one_that_is_ended_while_it_responds_is_named_with_the_calls_it_is_in(killed) -> None:
    class Responding(Watched):
        def where(self) -> str:
            return "all_reduce (distributed_c10d.py:2810) < fit (policy.py:95)"

    rank = Responding("rank 0", "rank 0", 600.0, "--rank_timeout_s")
    for _ in range(302):
        rank.hear(Health("updating the policy", 3, None, 7), 2.0)
    run = Watch([rank])
    run._judge()
    expected = " while updating the policy, stuck in all_reduce (distributed_c10d.py:2810) < fit"
    assert expected in str(run.failure)


class Sleepless(LLMRayActor):
    """An engine whose device does not give its memory back."""

    is_started, is_busy, num_steps = True, False, 5

    def sleep(self) -> None:
        begun.set()
        freed.wait(60)


begun, freed = threading.Event(), threading.Event()


def test_an_engine_that_does_not_fall_asleep_is_quiet() -> None:
    engine, seen = Sleepless({}, None, "vllm-0", "no/run"), watched("engine vllm-0")

    async def call() -> None:
        sleeping = asyncio.ensure_future(engine.run("sleep"))
        await asyncio.to_thread(begun.wait, 60)
        for _ in range(2):
            seen.hear(engine.health(), 2.0)
        freed.set()
        await sleeping

    asyncio.run(call())
    assert seen.quiet.seconds == 2.0 and seen.describe().endswith(" for 2 s while falling asleep")
    seen.hear(engine.health(), 2.0)
    assert seen.quiet.seconds == 0.0  # it is idle


@pytest.mark.parametrize("method", [TrainedWorker.offload_states, TrainedWorker.reload_states])
def test_a_rank_whose_states_do_not_move_is_quiet(method: Any) -> None:
    rank, seen = PolicyModelActor(PPOConfig(), "actor", "no/run"), watched()

    def hang() -> None:
        for _ in range(2):
            seen.hear(rank.health(), 2.0)

    rank.engine = SimpleNamespace(offload_states=hang, reload_states=hang)  # type: ignore[assignment]
    method(rank)
    assert seen.quiet.seconds == 2.0 and " while moving states of the policy " in seen.describe()
    seen.hear(rank.health(), 2.0)
    assert seen.quiet.seconds == 0.0


def part(tag: str, sample: int, start: int, *ids: int, reason: str = "") -> Beginning:
    logprobs = array("f", [-number for number in ids])
    return Beginning(tag, sample, start, array("i", ids), logprobs, ((0, 3),), reason)


def test_tokens_of_requests_in_flight_are_kept_and_come_with_the_error_of_a_lost_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def died(*_: object, **__: object) -> None:
        raise LostEngineError("vllm-0 died")

    replies: list[Future[None]] = []
    sent: list[GenerationRequest] = []

    def remote(request: GenerationRequest) -> SimpleNamespace:
        replies.append(Future())
        sent.append(request)
        return SimpleNamespace(future=lambda reply=replies[-1]: reply)

    actor = SimpleNamespace(sample=SimpleNamespace(remote=remote))
    engine = RayEngine("vllm-0", handle=actor, on_lost=lambda *_: None)
    monkeypatch.setattr(vllm_engine, "get", died)
    seen = WatchedEngine(engine, 300.0)

    def hear(num_done: int, *reported: Beginning) -> None:
        seen.hear(Health("generating", num_done, None, 7, reported), 2.0)

    async def run() -> None:
        asked = GenerationRequest("step1/7", (1, 2), SamplingSettings(num_samples=3))
        first, second = (asyncio.ensure_future(engine.sample(asked)) for _ in range(2))
        await asyncio.sleep(0)
        mine, other = (request.tag for request in sent)  # names come again, tags do not
        assert mine != other and not asked.tag
        hear(0, part(mine, 1, 0, 5), part("gone", 0, 0, 9), part(other, 0, 0, 7))
        hear(0)
        hear(1, part(mine, 1, 1, 6, 8), part(mine, 0, 4, 9), part(mine, 2, 0, 4, reason="stop"))
        hear(1, part(mine, 1, 5, 9))  # the report before it did not come
        assert seen.quiet.seconds == 2.0  # a report is no progress by itself
        replies[0].set_exception(ray.exceptions.ActorDiedError())
        with pytest.raises(LostEngineError) as lost:
            await first
        assert lost.value.made == {
            1: Completion((5, 6, 8), (-5.0, -6.0, -8.0), "", 3),
            2: Completion((4,), (-4.0,), "stop", 3),
        }
        assert engine.made.keys() == {other}
        hear(2, part(mine, 1, 3, 7))
        assert engine.made.keys() == {other}
        second.cancel()
        replies[1].set_result(None)
        await asyncio.wait([second])
        assert not engine.made and not engine.requests

    monkeypatch.setattr(vllm_engine.ray, "cancel", lambda _: None)
    asyncio.run(run())


def test_an_engine_in_place_of_a_lost_one_has_its_start_to_take_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(vllm_engine, "get", lambda _, who, limit_s, **more: limits.append(limit_s))
    run = SimpleNamespace(remote=lambda *_: object())
    engine = RayEngine("vllm-0", handle=SimpleNamespace(run=run), restart_timeout_s=1800.0)
    for engine.is_lost in (True, False):
        engine.call(LLMRayActor.sleep)
    assert limits == [1800.0, launcher.CALL_TIMEOUT_S]
