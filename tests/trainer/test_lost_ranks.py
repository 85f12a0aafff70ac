"""A trainer whose ranks are lost goes back to its last checkpoint: every step is made once in the
end, every prompt trained on once.
"""

import os
import re
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.commands.replay import read_step
from openrlhf.commands.train_rl import _export, fit_and_export, init_models, phases_of
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed import folders
from openrlhf.distributed.checkpoints import DataIdentity, RunCheckpoints
from openrlhf.errors import (
    CheckpointError,
    DataError,
    EngineError,
    LostEngineError,
    LostRankError,
    NoRestartError,
    OpenRLHFError,
)
from openrlhf.trainer.device_phases import DevicePhases
from openrlhf.trainer.ppo_utils.experience import Experience, opened
from openrlhf.trainer.ppo_utils.worker_group import start_forward
from openrlhf.trainer.ray import launcher
from openrlhf.trainer.ray.restarts import Restarts
from openrlhf.trainer.workers.critic_and_frozen import ReferenceModelActor
from openrlhf.trainer.workers.model_worker import TrainedWorker
from openrlhf.trainer.workers.weight_sync import SyncFailure
from openrlhf.utils import progress, stopping
from openrlhf.utils.callbacks import Callback
from tests.helpers.rollouts import rollout
from tests.trainer.fakes import (
    EndsAt,
    FakeActor,
    World,
    make_trainer,
    staleness_histogram,
    steps_of,
)


def lost(role: str) -> LostRankError:
    error = LostRankError(f"{role} rank 0 of 1 died: pid 7 was killed by SIGKILL")
    error.role = role
    return error


@dataclass
class LosingActor(FakeActor):
    """Loses its rank in some updates and some saves, once each; its model is its version."""

    lost_in_updates: set[int] = field(default_factory=set)  # by the version before
    lost_in_saves: set[int] = field(default_factory=set)
    lost_in_writes: set[int] = field(default_factory=set)  # beside the next step
    lost_in_loads: int = 0
    poison: int | None = None  # the version before an update that always ends a rank
    num_starts: int = 0

    def start(self, method: Any, shares: Any) -> Any:
        self.lose(self.lost_in_updates)
        if self.world.policy_version == self.poison:
            raise lost("actor")
        return super().start(method, shares)

    def call(self, method: Any, *args: Any, **options: Any) -> Any:
        if method is TrainedWorker.take_states:
            self.lose(self.lost_in_saves)
            self.taken = Path(args[0], "actor"), str(self.world.policy_version)
            return [{}]
        elif method is TrainedWorker.num_state_bytes:
            return [1000]
        elif method is TrainedWorker.save_states:  # for a replay
            Path(args[0], "actor").write_text(str(self.world.policy_version))
        elif method is TrainedWorker.load_states:
            if self.lost_in_loads:
                self.lost_in_loads -= 1
                raise lost("actor")
            self.world.policy_version = int(Path(args[0], "actor").read_text())
            return [True]
        else:
            return super().call(method, *args, **options)

    def call_aside(self, method: Any) -> list[str]:
        assert method is TrainedWorker.write_taken
        file, text = self.taken
        if int(text) in self.lost_in_writes:
            self.lost_in_writes.remove(int(text))
            raise lost("actor")
        file.write_text(text)
        return [""]

    def lose(self, versions: set[int]) -> None:
        if (version := self.world.policy_version) in versions:
            versions.remove(version)
            raise lost("actor")

    def start_again(self, why: LostRankError | None = None) -> None:
        self.num_starts += 1
        self.world.policy_version = 0


def losing_trainer(
    world: World, folder: Path, *, save_steps: int, is_async: bool = False, **losses: Any
) -> tuple[Any, LosingActor]:
    """A trainer of eight steps whose actor loses its rank now and then."""
    trainer, actor = make_trainer(world, num_prompts=32, is_async=is_async), LosingActor(world)
    for name, value in losses.items():
        setattr(actor, name, value)
    trainer.groups["actor"], trainer.state.groups = actor, {"actor": actor}
    ckpt = {"save_steps": save_steps, "path": str(folder), "best_metric_key": "none"}
    config = PPOConfig.model_validate({"ckpt": ckpt}).ckpt
    trainer.state.checkpoints = RunCheckpoints(config, DataIdentity("prompts", 32))
    return trainer, actor


def test_steps_that_are_made_again_and_restarts_count_against_the_goodput(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    trainer, actor = losing_trainer(
        World(train_s=0.1), tmp_path, save_steps=-1, lost_in_updates={5}
    )
    start_again = actor.start_again
    actor.start_again = lambda why: (time.sleep(0.5), start_again(why))  # type: ignore[method-assign]
    trainer.recovery = SimpleNamespace(num_losses=1)
    trainer.fit()
    kept_s = sum(step["timing/step_total"] for step in steps_of(trainer))
    assert kept_s > 0.8 and steps_of(trainer)[-1]["goodput"] == pytest.approx(
        kept_s / (kept_s + 5 * kept_s / 8 + 0.5), abs=0.2
    )
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"goodput [3-7]\d%: 1 loss\(es\) of processes; \d+ of \d+ s were not spent", said
    )


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("save_steps", [1, 3, -1])
def test_every_step_is_made_once_though_ranks_are_lost(
    tmp_path: Path, save_steps: int, is_async: bool
) -> None:
    world = World()
    losses = {"lost_in_updates": {1, 4, 6}, "lost_in_saves": {3}}
    losses["lost_in_loads"] = int(save_steps > 0)
    trainer, actor = losing_trainer(
        world, tmp_path, save_steps=save_steps, is_async=is_async, **losses
    )
    trainer.fit()
    assert [step["step"] for step in steps_of(trainer)] == list(range(1, 9))
    ledger = trainer.sampler.ledger
    assert ledger.outcomes == {"trained": 32} and not ledger.pending
    assert world.policy_version == trainer.state.weight_version == 8
    assert sum(staleness_histogram(trainer).values()) in (0, 64)
    found = [r["step"] for r in trainer.tracker.records() if "eval/eval_default_pass1" in r]
    assert found == [0, 3, 6, 8] and trainer.state.evaluations[0]["step"] == 0
    assert not list(trainer.inputs.run_dir.glob("dumps/*"))  # each went well the second time
    assert actor.num_starts == (3 if save_steps == -1 else 5)
    if save_steps == 1 and not is_async:  # only what a save lost is sampled anew
        assert len(world.submitted) == 32 + 4


@pytest.mark.parametrize("is_async", [False, True])
def test_a_rank_that_is_lost_while_its_states_are_written_costs_that_checkpoint(
    tmp_path: Path, is_async: bool
) -> None:
    world = World()
    trainer = make_trainer(world, num_prompts=32, is_async=is_async)
    actor = LosingActor(world, lost_in_writes={4, 8})
    trainer.groups["actor"], trainer.state.groups = actor, {"actor": actor}
    ckpt = {"save_steps": 2, "path": str(tmp_path), "best_metric_key": "none"}
    config = PPOConfig.model_validate({"ckpt": ckpt}).ckpt
    trainer.state.checkpoints = RunCheckpoints(config, DataIdentity("prompts", 32))
    trainer.fit()
    assert not actor.lost_in_writes and actor.num_starts == 2
    assert [step["step"] for step in steps_of(trainer)] == list(range(1, 9))
    ledger = trainer.sampler.ledger
    assert ledger.outcomes == {"trained": 32} and not ledger.pending
    assert trainer.state.checkpoints.store.steps()[-1] == world.policy_version == 8


@pytest.mark.parametrize("is_async", [False, True])
def test_a_rank_that_is_lost_while_nothing_can_be_generated_is_started_again(
    tmp_path: Path, is_async: bool
) -> None:
    waiting: list[object] = []

    def seconds_of(key: tuple[int, int]) -> float:
        """All engines wait for the rank, once."""
        if key[1] == 20 and not waiting:
            waiting.append(key)
            raise lost("actor")
        return 0.0

    world = World(seconds_of=seconds_of)
    trainer, actor = losing_trainer(world, tmp_path, save_steps=1, is_async=is_async)
    trainer.fit()
    assert waiting and actor.num_starts == 1
    assert [step["step"] for step in steps_of(trainer)] == list(range(1, 9))
    assert trainer.sampler.ledger.outcomes == {"trained": 32}


def test_a_run_that_is_asked_to_stop_does_not_start_lost_ranks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, actor = losing_trainer(World(), tmp_path, save_steps=1, lost_in_updates={2})
    steps = trainer.train_step

    def train_and_ask(rollouts: Any, step: int, metrics: Any) -> Any:
        if step == 3:
            monkeypatch.setattr(stopping, "is_asked", lambda: True)
        return steps(rollouts, step, metrics)

    trainer.train_step = train_and_ask
    with pytest.raises(stopping.Interrupted, match=f"step 2 was saved in {tmp_path}. To go on, "):
        trainer.fit()
    assert actor.num_starts == 0


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("asks_first", [False, True])
def test_a_run_that_is_asked_to_stop_while_a_frozen_model_starts_again_saves_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool, asks_first: bool
) -> None:
    """`asks_first`: before the rank is lost."""

    class Reference:
        num_shares, num_calls, is_closed = 1, 0, False

        def start(self, method: Any, shares: Any) -> Any:
            [(share,)] = shares
            self.num_calls += 1

            def wait() -> list[Any]:
                if self.num_calls == 3:
                    if asks_first:
                        os.kill(os.getpid(), signal.SIGINT)
                    raise lost("ref")
                return [torch.zeros(int(opened(share).num_actions.sum()))]

            return wait

        def start_again(self, why: LostRankError) -> None:
            assert not asks_first
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)  # until it is left

        def close(self) -> None:
            self.is_closed = True

    trainer, actor = losing_trainer(World(), tmp_path, save_steps=100, is_async=is_async)
    trainer.groups["ref"] = reference = Reference()
    method = ReferenceModelActor.compute_logprobs
    trainer.forwards = {"ref_logprobs": partial(start_forward, reference, method)}
    begun_at = time.monotonic()
    monkeypatch.setattr(stopping, "_listener", stopping._listener)  # the next test was not asked
    with (
        stopping.listening(),
        pytest.raises(stopping.Interrupted, match=f"step 2 is done, it was saved in {tmp_path}"),
    ):
        fit_and_export(trainer, lambda: None, 60.0)
    assert time.monotonic() - begun_at < 30 and reference.is_closed
    assert actor.world.policy_version == 2
    saved = trainer.state.checkpoints.last()
    assert saved.step == 2
    ledger = saved.state["run"]["sampler"]["ledger"]
    assert ledger["outcomes"] == {"trained": 8}
    assert ledger["num_drawn"] == 8 + len(ledger["pending"]) and bool(ledger["pending"]) == is_async


def test_a_run_that_is_asked_to_stop_ends_a_reward_model_that_holds_the_devices(
    tmp_path: Path,
) -> None:
    trainer, _ = losing_trainer(World(), tmp_path, save_steps=100)
    trainer.fit()
    closed, lock = threading.Event(), threading.RLock()

    def start_again() -> None:
        with lock:
            holding.set()
            closed.wait(60)

    holding = threading.Event()
    threading.Thread(target=start_again, daemon=True).start()
    holding.wait(60)
    trainer.phases.device_lock = lock
    trainer.groups["reward"] = SimpleNamespace(close=closed.set)
    begun_at = time.monotonic()
    with pytest.raises(stopping.Interrupted, match="it was saved in "):
        trainer.stop()
    assert time.monotonic() - begun_at < 30


def test_a_run_that_was_to_end_behind_a_step_that_is_made_again_goes_on(tmp_path: Path) -> None:
    trainer, _ = losing_trainer(World(), tmp_path, save_steps=2, is_async=True, lost_in_saves={6})
    ended: list[int] = []

    class EndOnce(Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if step == 6 and not ended:
                ended.append(step)
                trainer.end()

    trainer.callbacks = [EndOnce()]
    trainer.fit()
    assert ended and trainer.state.global_step == 8


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_that_ends_a_rank_twice_in_the_same_way_is_kept_and_ends_the_run(
    tmp_path: Path, is_async: bool
) -> None:
    trainer, actor = losing_trainer(
        World(), tmp_path, save_steps=1, is_async=is_async, lost_in_updates={1}, poison=4
    )
    with pytest.raises(EngineError) as caught:
        trainer.fit()
    run_dir, said = trainer.inputs.run_dir, str(caught.value)
    assert said.startswith("actor rank 0 of 1 died: pid 7 was killed by SIGKILL. Step 5 has ended")
    assert said.endswith(f"It was kept: openrlhf replay {run_dir} --step 5")
    assert caught.value.exit_code == 3 and actor.num_starts == 2
    kept = read_step(run_dir, 5)
    assert (kept.folder / "actor").read_text() == "4"  # the weights before the step
    assert len(kept.rollouts) == 8 and kept.computed is None
    assert kept.error == "actor rank 0 of  died: pid  was killed by SIGKILL"


def test_only_the_same_rank_of_a_step_ends_in_the_same_way_and_a_node_is_no_samples_fault(
    tmp_path: Path,
) -> None:
    trainer, _ = losing_trainer(World(), tmp_path, save_steps=1)
    trainer._step = trainer.state.global_step = 5
    trainer._step_rollouts = [rollout([1], [2])]
    died = "actor rank {} of 64 on node 10.0.0.{} died: pid {} {}"
    for rank, end in ((0, "was killed by SIGKILL"), (40, "was killed by SIGKILL")):
        trainer.note_rank_failure(LostRankError(died.format(rank, rank, 7 + rank, end)))
    for node in (3, 3):
        trainer.note_rank_failure(LostRankError(died.format(9, node, 7, "ended with its node")))
    with pytest.raises(EngineError, match="not made a third time"):
        trainer.note_rank_failure(LostRankError(died.format(40, 1, 99, "was killed by SIGKILL")))


def test_a_suspect_step_is_not_kept_where_the_disk_has_no_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    full = {"dumps": 1049}
    monkeypatch.setattr(folders, "free_bytes", lambda path: full.get(path.parent.name, 10**9))
    trainer, _ = losing_trainer(World(), tmp_path, save_steps=1, poison=4)
    with pytest.raises(EngineError, match="Step 5 has ended in this way before") as caught:
        trainer.fit()
    assert "It was kept" not in str(caught.value)
    assert "warning: step 5 was not kept: it takes 0.0 MB, " in capsys.readouterr().err
    assert not list(trainer.inputs.run_dir.glob("dumps/*"))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("save_steps", "end", "exported"), [(3, 8, [8, 8]), (5, 5, [5, 5])])
def test_a_rank_that_is_lost_in_the_last_export_does_not_end_the_run(
    tmp_path: Path, save_steps: int, end: int, exported: list[int], is_async: bool
) -> None:
    trainer, actor = losing_trainer(World(), tmp_path, save_steps=save_steps, is_async=is_async)
    trainer.callbacks = [EndsAt(end)]
    done: list[int] = []

    def export() -> None:
        done.append(actor.world.policy_version)
        if len(done) == 1:
            raise lost("actor")

    fit_and_export(trainer, export, 60.0)
    assert done == exported and actor.num_starts == 1
    assert [step["step"] for step in steps_of(trainer)] == list(range(1, end + 1))


def test_saves_that_fail_up_to_the_last_step_do_not_cost_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, actor = losing_trainer(World(), tmp_path, save_steps=1)
    monkeypatch.setattr(folders, "free_bytes", lambda path: 0)
    trainer.callbacks = [EndsAt(3)]
    exported: list[int] = []
    with pytest.raises(CheckpointError, match=r"in a row: stopping\. The model was written"):
        fit_and_export(trainer, lambda: exported.append(actor.world.policy_version), 60.0)
    assert exported == [3]


def test_new_ranks_that_cannot_load_their_checkpoint_are_not_exported(tmp_path: Path) -> None:
    trainer, actor = losing_trainer(World(), tmp_path, save_steps=3, lost_in_updates={4})
    call = actor.call

    def unreadable(method: Any, *args: Any, **options: Any) -> Any:
        if method is TrainedWorker.load_states:
            raise CheckpointError("[Errno 116] Stale file handle")
        return call(method, *args, **options)

    actor.call = unreadable  # type: ignore[method-assign]
    exported: list[int] = []
    with pytest.raises(EngineError, match=r"SIGKILL\. The new ranks cannot load .*step3: .*Stale"):
        fit_and_export(trainer, lambda: exported.append(actor.world.policy_version), 60.0)
    assert exported == []


def test_a_new_engine_that_did_not_get_its_weights_is_not_used(tmp_path: Path) -> None:
    trainer, actor = losing_trainer(World(), tmp_path, save_steps=-1)
    failure = {0: SyncFailure("the broadcast of weights failed", is_lost=False)}
    actor.call = lambda *_: [failure]  # type: ignore[method-assign]
    engine = SimpleNamespace(is_up=False, is_lost=True)
    with pytest.raises(LostEngineError, match="the broadcast of weights failed"):
        trainer.update_engine(engine)
    assert engine.is_lost


def test_a_rank_that_is_lost_while_the_first_models_load_is_started_again() -> None:
    class Group:
        num_shares = 1

        def start(self, method: Any, shares: Any) -> Any:
            def wait() -> list[int]:
                raise lost("ref")

            return wait

        def start_again(self, why: LostRankError) -> int:
            return 7_000_000

    config = PPOConfig.model_validate({"actor": {"model_name_or_path": "m"}})
    phases = DevicePhases([], engines_sleep=False, training_sleeps=False)
    assert init_models(config, {"ref": Group()}, [1], phases) == {"ref": 7_000_000}  # type: ignore[dict-item]


def test_who_loads_or_writes_a_model_for_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    class Slow:
        num_shares = 1

        def start(self, method: Any, shares: Any) -> Any:
            return lambda: [time.sleep(0.3) or 7_000_000]

        def call(self, method: Any, *args: Any) -> None:
            time.sleep(0.3)

    monkeypatch.setattr(progress, "SAY_AFTER_S", 0.1)
    given = {"actor": {"model_name_or_path": "m"}, "ckpt": {"output_dir": str(tmp_path / "run")}}
    config, groups = PPOConfig.model_validate(given), {"actor": Slow()}
    phases = DevicePhases([], engines_sleep=False, training_sleeps=False)
    init_models(config, groups, [1], phases)  # type: ignore[arg-type]
    _export(config, groups)  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "waited 0 s for actor to load its model" in said
    assert f"waited 0 s for actor to write its model to {tmp_path / 'run'}" in said


def test_new_ranks_that_load_their_checkpoint_for_long_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    trainer, actor = losing_trainer(World(), tmp_path, save_steps=1, lost_in_updates={2})
    call = actor.call

    def slowly(method: Any, *args: Any, **options: Any) -> Any:
        time.sleep(0.3 * (method is TrainedWorker.load_states))
        return call(method, *args, **options)

    actor.call = slowly  # type: ignore[method-assign]
    monkeypatch.setattr(progress, "SAY_AFTER_S", 0.1)
    trainer.fit()
    said = capsys.readouterr().out
    assert f"waited 0 s for actor to load {tmp_path}/global_step2" in said


def test_a_rank_that_hangs_at_its_start_is_lost_and_while_its_model_loads_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    made: list[SimpleNamespace] = []
    hanging = {(0, "join"), (2, "run")}  # the last one of a start in place of lost ones

    def make(*_: object) -> SimpleNamespace:
        number = len(made)
        calls = {
            name: SimpleNamespace(remote=lambda *_, name=name: (number, name))
            for name in ("endpoint", "join", "run")
        }
        made.append(SimpleNamespace(**calls))
        return made[-1]

    def wait(
        references: list[tuple[int, str]], timeout: float, num_returns: int = 1
    ) -> tuple[list, list]:
        if references[0] in hanging:
            assert timeout in (0, 1800)
            return [], references
        return references[:1], references[1:]

    results = {"endpoint": ("host", 1), "join": "10.0.0.1", "run": 950}
    monkeypatch.setattr(launcher, "start_actor", make)
    monkeypatch.setattr(launcher, "wait_for_node", lambda *_: None)
    monkeypatch.setattr(launcher.ray, "kill", lambda handle: None)
    monkeypatch.setattr(launcher.ray, "wait", wait)
    monkeypatch.setattr(launcher.ray, "get", lambda reference, timeout: results[reference[1]])
    group = launcher.RayActorGroup(
        TrainedWorker, PPOConfig(), [{}, {}], role="critic", run_dir="run", restarts=Restarts(3)
    )
    with pytest.raises(LostRankError, match="critic rank 0 of 2 did not respond in 1800 s"):
        group.join()
    assert group.start_again() == 950 and not group.is_starting
    assert len(made) == 6 and group.handles == made[4:]
    said = " ".join(capsys.readouterr().err.split())
    assert "critic rank 0 of 2 on node 10.0.0.1 did not respond in 1800 s; critic is" in said
    assert "restart 1 of 3" in said


def test_the_error_of_one_rank_is_raised_though_its_peers_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles = [SimpleNamespace(run=SimpleNamespace(remote=lambda *_, n=n: n)) for n in range(3)]
    monkeypatch.setattr(launcher, "start_actor", lambda *_: handles.pop(0))

    def wait(references: list[int], **_: object) -> tuple[list[int], list[int]]:
        done = [number for number in references if number == 1]
        return done, [number for number in references if number != 1]

    def get(reference: int, timeout: float) -> None:
        if reference != 1:
            raise launcher.ray.exceptions.GetTimeoutError
        raise launcher.ray.exceptions.RayTaskError("run", "", DataError("row 3: no prompt"))

    monkeypatch.setattr(launcher.ray, "wait", wait)
    monkeypatch.setattr(launcher.ray, "get", get)
    group = launcher.RayActorGroup(
        TrainedWorker, PPOConfig(), [{}, {}, {}], role="actor", run_dir="run"
    )
    with pytest.raises(DataError, match=r"^row 3: no prompt \[actor rank 1 of 3\]$"):
        group.call(TrainedWorker.offload_states)


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> launcher.RayActorGroup:
    """A group whose ranks start as soon as `join` of the group returns."""
    monkeypatch.setattr(launcher, "PAUSE_S", 0.0)
    monkeypatch.setattr(launcher, "start_actor", lambda *_: SimpleNamespace())
    monkeypatch.setattr(launcher, "wait_for_node", lambda *_: None)
    monkeypatch.setattr(launcher.ray, "kill", lambda handle: None)
    group = launcher.RayActorGroup(
        TrainedWorker, PPOConfig(), [{}, {}], role="ref", run_dir="run", restarts=Restarts(2)
    )
    monkeypatch.setattr(group, "_submit", lambda *_: [])
    monkeypatch.setattr(group, "_wait", lambda *_: [950])
    return group


def test_a_start_in_place_of_lost_ranks_that_fails_is_made_again_as_often_as_is_allowed(
    starting: launcher.RayActorGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [OpenRLHFError("ref rank 0: the port is taken"), OpenRLHFError("no memory")]

    def join() -> None:
        if faults:
            raise faults.pop(0)

    monkeypatch.setattr(starting, "join", join)
    with pytest.raises(EngineError, match=r"no memory\. It is not started again: 2 restart"):
        starting.start_again(lost("ref"))
    starting.restarts.most = 3
    faults.append(OpenRLHFError("no memory"))
    assert starting.start_again() == 950 and not starting.is_starting
    faults.append(NoRestartError("ref rank 0 was on a node that is gone"))
    with pytest.raises(NoRestartError):
        starting.start_again()


def test_ranks_that_are_started_while_the_run_ends_are_ended(
    starting: launcher.RayActorGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[object] = []
    new = SimpleNamespace()

    def make() -> SimpleNamespace:
        starting.close()
        return new

    def join() -> None:
        raise lost("ref")

    monkeypatch.setattr(launcher.ray, "kill", killed.append)
    monkeypatch.setattr(starting, "_make", [make])
    monkeypatch.setattr(starting, "join", join)
    with pytest.raises(EngineError, match="the run has ended, nothing starts again"):
        starting.start_again(lost("ref"))
    assert killed[-1] is new


def test_a_group_that_does_not_start_again_is_named_until_it_has(
    starting: launcher.RayActorGroup,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(progress, "SAY_AFTER_S", 0.1)
    monkeypatch.setattr(starting, "join", lambda: time.sleep(0.3))
    starting.start_again()
    assert "waited 0 s for ref to start again: see run/logs/ref-*" in capsys.readouterr().out


BROKEN = "[…/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:5"


@pytest.mark.parametrize(
    ("felt", "known_after_s", "raised", "said"),
    [
        (RuntimeError(BROKEN), 12, LostRankError, "actor rank 1 of 3 died"),
        (RuntimeError(BROKEN), 99, LostRankError, "actor rank 0 of 3: RuntimeError: […/gloo"),
        (RuntimeError("a bug"), 12, OpenRLHFError, "actor rank 0 of 3: RuntimeError: a bug"),
    ],
)
def test_the_end_of_a_node_that_ray_knows_of_late_is_behind_a_broken_collective(
    felt: Exception,
    known_after_s: float,
    raised: type,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles = [SimpleNamespace(run=SimpleNamespace(remote=lambda *_, n=n: n)) for n in range(3)]
    monkeypatch.setattr(launcher, "start_actor", lambda *_: handles.pop(0))

    def wait(
        references: list[int], timeout: float, num_returns: int = 1
    ) -> tuple[list[int], list[int]]:
        """Rank 0 has failed, rank 1 is known to be dead after a time, rank 2 hangs."""
        done = [n for n in references if n == 0 or (n == 1 and 0 not in references)]
        if timeout < known_after_s:
            done = []
        return done, [n for n in references if n not in done]

    def get(reference: int, timeout: float) -> None:
        if reference == 0:
            raise launcher.ray.exceptions.RayTaskError("run", "", felt)
        raise launcher.ray.exceptions.NodeDiedError("its node has died")

    monkeypatch.setattr(launcher.ray, "wait", wait)
    monkeypatch.setattr(launcher.ray, "get", get)
    group = launcher.RayActorGroup(
        TrainedWorker, PPOConfig(), [{}, {}, {}], role="actor", run_dir="run"
    )
    with pytest.raises(OpenRLHFError) as caught:
        group.call(TrainedWorker.offload_states)
    assert type(caught.value) is raised and str(caught.value).startswith(said)


def test_a_new_engine_and_training_take_turns_on_devices_that_they_share() -> None:
    for flags, has_turn in (("--colocate_all_models", True), ("", False)):
        words = f"--pretrain m --prompt_data d --reward_pretrain r {flags}".split()
        phases = phases_of(parse_config(PPOConfig, words).config, [])
        assert isinstance(phases.device_lock, nullcontext) != has_turn


@pytest.mark.parametrize("role", ["ref", "critic"])
def test_a_frozen_model_whose_rank_is_lost_computes_the_batch_once_more(role: str) -> None:
    started = []

    class Group:
        num_shares = 1

        def start(self, method: Any, shares: Any) -> Any:
            [(share,)] = shares

            def wait() -> list[Any]:
                if len(started) < 2:
                    raise lost(role)
                return [opened(share).seq_lengths.float()]

            return wait

        def start_again(self, why: LostRankError) -> None:
            started.append(why)

    experience = Experience.from_rollouts([rollout([1, 2], [3, 4, 5])])
    wait = start_forward(Group(), ReferenceModelActor.compute_logprobs, experience)  # type: ignore[arg-type]
    if role == "critic":  # its weights are those of a checkpoint then: the step begins anew
        with pytest.raises(LostRankError):
            wait()
        assert not started
    else:
        assert wait().tolist() == [5.0]
        assert len(started) == 2
