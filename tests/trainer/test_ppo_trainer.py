"""Synchronous RL over plain fakes: what a run evaluates, saves and refuses, and its state."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.commands.train_rl import _export
from openrlhf.config.common import CheckpointConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.sampler import PromptCursor
from openrlhf.distributed.checkpoints import DataIdentity, RunCheckpoints
from openrlhf.distributed.folders import holding
from openrlhf.errors import ConfigError, EngineError, NumericsError, RewardError
from openrlhf.rollout.scoring import FailurePolicy
from openrlhf.rollout.step_sampler import StepSampler
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.device_phases import DevicePhases
from openrlhf.trainer.ppo_state import RunState
from openrlhf.trainer.ppo_utils.update_plan import Skip, UpdateResult
from openrlhf.trainer.workers.model_worker import TrainedWorker
from openrlhf.trainer.workers.policy import PolicyModelActor
from openrlhf.utils.callbacks import Callback
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.tracker import read_metrics
from tests.trainer.fakes import EndsAt, World, make_trainer, samples


class Heard(Callback):
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.told.append(("step", step))

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.told.append(("evaluation", step))


def test_a_run_evaluates_first_at_intervals_and_last() -> None:
    world, heard = World(), Heard()
    trainer = make_trainer(world, num_prompts=18, is_async=False, callbacks=[heard])
    trainer.fit()
    first, *steps = heard.told
    assert first == ("evaluation", 0)
    one_to_three = [("step", 1), ("step", 2), ("step", 3), ("evaluation", 3)]
    assert steps == [*one_to_three, ("step", 4), ("step", 5), ("evaluation", 5)]
    assert trainer.sampler.ledger.outcomes == {"trained": 18}
    assert world.trained == [8, 8, 8, 8, 4]
    # The weights are sent before the first samples, and after every update.
    assert world.policy_version == world.version == trainer.num_steps == 5


def test_an_evaluation_without_rewards_is_said_and_training_goes_on(caplog) -> None:
    heard = Heard()
    world = World(unscored=frozenset({"eval3"}))
    make_trainer(world, num_prompts=18, is_async=False, callbacks=[heard]).fit()
    assert [step for what, step in heard.told if what == "evaluation"] == [0, 5]
    assert "no evaluation at step 3, training goes on: the server is away" in caplog.text
    caplog.clear()
    make_trainer(World(unscored=frozenset({"eval5"})), num_prompts=18, is_async=False).fit()
    assert caplog.text.count("no evaluation at step 5") == 1  # the last one is not made again


def test_a_first_evaluation_without_rewards_ends_the_run() -> None:
    trainer = make_trainer(World(unscored=frozenset({"eval0"})), num_prompts=18, is_async=False)
    with pytest.raises(RewardError, match="the server is away"):
        trainer.fit()


@pytest.mark.parametrize("has_failed", [False, True])
def test_models_with_gpus_of_their_own_are_updated_at_once(
    has_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def start_update(*args: object, role: str, **options: object) -> Callable[[], list]:
        done.append(f"start {role}")

        def wait() -> list:
            done.append(f"end {role}")
            if has_failed and role == "critic":
                raise NumericsError("its loss is nan")
            return [UpdateResult(Metrics())]

        return wait

    monkeypatch.setattr(ppo_trainer, "start_update", start_update)
    trainer = make_trainer(World(), num_prompts=4, is_async=False)
    trainer.groups = dict.fromkeys(("critic", "actor"))
    dump = SimpleNamespace(begun=[], step_inputs=None)
    failure = pytest.raises(NumericsError, match="nan") if has_failed else nullcontext()
    with failure:
        trainer._update(["critic", "actor"], None, dump)
    assert done == ["start critic", "start actor", "end critic", "end actor"]
    assert dump.begun == ["critic", "actor"]


def test_updates_that_are_skipped_are_said_and_those_behind_them_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    calls: list[tuple[str, int]] = []
    skips = {("actor", 0): Skip(1, 2, "the loss is nan"), ("actor", 2): Skip(3, 0, "it is inf")}

    def start_update(*args: object, role: str, num_done: int, **options: object) -> Any:
        calls.append((role, num_done))
        return lambda: [UpdateResult(Metrics(), skip=skips.get((role, num_done)))] * 2

    kept: list[str] = []
    monkeypatch.setattr(ppo_trainer, "start_update", start_update)
    trainer = make_trainer(World(), num_prompts=4, is_async=False)
    trainer.groups = dict.fromkeys(("critic", "actor"))
    dump = trainer.dump_of([], 7)
    monkeypatch.setattr(dump, "keep_failed", kept.append)
    results = trainer._update(["critic", "actor"], None, dump)
    assert calls == [("critic", 0), ("actor", 0), ("actor", 2)]
    assert results["critic"][0].skip is None and results["actor"][0].skip.done == 3
    said = " ".join(capsys.readouterr().err.split())
    for why in ("the loss is nan", "it is inf"):
        assert f"step 7: an update of the actor was skipped, its weights stay: {why}." in said
    assert kept == ["the loss is nan"]  # the first one of the run


def test_a_run_that_is_told_to_ends_after_the_step_with_an_evaluation() -> None:
    trainer = make_trainer(World(), num_prompts=40, is_async=False, callbacks=[EndsAt(2)])
    trainer.fit()
    records = read_metrics(trainer.tracker.path)
    assert [r["step"] for r in records if "eval/eval_default_pass1" in r] == [0, 2]
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_filtered_and_failed_groups_are_replaced_and_counted(is_async: bool) -> None:
    world = World(
        scores_of=lambda key: (0.0, 1.0) if key[1] % 3 else (1.0, 1.0),
        failing=frozenset({(0, 1), (1, 4)}),
    )
    trainer = make_trainer(
        world, num_prompts=30, with_filter=True, num_episodes=2, is_async=is_async
    )
    trainer.fit()
    ledger = trainer.sampler.ledger
    assert ledger.outcomes == {"trained": 38, "filtered:no signal": 20, "failed:reward": 2}
    assert ledger.num_drawn == 60 and not ledger.pending
    # Two groups are left for the last step.
    assert world.trained == [8] * 9 + [4]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_that_trained_on_nothing_is_an_error(is_async: bool) -> None:
    world = World(scores_of=lambda key: (1.0, 1.0))
    trainer = make_trainer(world, num_prompts=8, with_filter=True, is_async=is_async)
    with pytest.raises(RewardError, match=r"8 drawn, 8 filtered:no signal \(pass rate 0 %\)"):
        trainer.fit()


def test_engine_and_trainer_that_disagree_in_the_first_step_end_the_run() -> None:
    assert make_trainer(World(), num_prompts=4, is_async=False).max_mismatch_kl == 1e-3
    trainer = make_trainer(World(), num_prompts=4, policy_dtype=torch.bfloat16, is_async=False)
    metrics = Metrics()
    trainer.check_mismatch(metrics, 4)
    assert not trainer.has_checked_mismatch  # a step without a signal compares nothing
    metrics.add("vllm_kl", 1.5)
    with pytest.raises(EngineError, match=r"mismatch KL 1\.50e\+00, limit 1e-01"):
        trainer.check_mismatch(metrics, 5)
    trainer.check_mismatch(metrics, 6)  # weights may have drifted by then


@pytest.mark.parametrize(
    ("is_async", "keeps_running", "taken", "refused"),
    [
        (False, False, [(4, 4)], [(3, 3), (5, 5), (3, 4)]),
        (True, False, [(4, 4), (3, 3)], [(2, 2), (5, 5), (3, 4)]),
        (True, True, [(4, 4), (3, 4)], [(2, 4)]),
    ],
)
def test_samples_too_far_behind_or_of_several_versions_are_refused(
    is_async: bool,
    keeps_running: bool,
    taken: list[tuple[int, int]],
    refused: list[tuple[int, int]],
) -> None:
    trainer = make_trainer(World(keeps_running=keeps_running), num_prompts=4, is_async=is_async)
    trainer.state.weight_version = 4

    def check(*versions: int) -> None:
        [sample] = samples((0, 0), [1.0], [0])
        trainer.check_versions([replace(sample, weight_versions=torch.tensor(versions))])

    for versions in taken:
        check(*versions)
    for versions in refused:
        with pytest.raises(
            EngineError, match=r"sampled under weights \[.*the policy is at 4, and "
        ):
            check(*versions)


def test_an_episode_whose_parts_are_of_several_versions_is_refused() -> None:
    trainer = make_trainer(World(), num_prompts=4, is_async=True)
    trainer.state.weight_version = 4
    parts = [
        replace(part, episode_id="step1/1/0", weight_versions=torch.tensor([version]))
        for part, version in zip(samples((0, 0), [1.0, 1.0], [0]), (3, 4), strict=True)
    ]
    trainer.check_versions(parts[:1])
    with pytest.raises(EngineError, match=r"sample step1/1/0 was sampled under weights \[3, 4\]"):
        trainer.check_versions(parts)


class Ranks:
    """A group of three ranks, some of which see files below another root."""

    def __init__(self, *blind: int) -> None:
        self.roots = ["/nowhere/" if rank in blind else "" for rank in range(3)]

    def call(self, method, path: str) -> list:
        workers = (TrainedWorker(PPOConfig(), "critic", "run", rank) for rank in range(3))
        return [method(one, root + path) for one, root in zip(workers, self.roots, strict=True)]


def checkpoints(root: Path, **ckpt: Any) -> RunCheckpoints:
    return RunCheckpoints(CheckpointConfig(path=str(root), **ckpt), DataIdentity("x", 1))


def state_of(config: PPOConfig, root: Path, **groups: Any) -> RunState:
    phases = DevicePhases([], engines_sleep=False, training_sleeps=False)
    return RunState(config, checkpoints(root, save_steps=config.ckpt.save_steps), groups, phases)


def test_ranks_that_do_not_see_the_folder_are_named_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    root = tmp_path / "ckpt"
    with holding(root, "--ckpt_path"):
        with pytest.raises(ConfigError, match=r"not seen by critic rank 1 on node .* nodes share"):
            state_of(
                PPOConfig.model_validate({"ckpt": {"save_steps": 5}}), root, critic=Ranks(1)
            ).check_is_shared()
        state_of(
            PPOConfig.model_validate({"ckpt": {"save_steps": 5}}), root, critic=Ranks()
        ).check_is_shared()
    state_of(PPOConfig(), tmp_path / "none", critic=Ranks(0, 1, 2)).check_is_shared()
    assert not (tmp_path / "none").exists()


def make(*, target: float | None = 0.1, coef: float = 0.5) -> RunState:
    prompts = [SimpleNamespace(row_id=row) for row in range(7)]
    cursor = PromptCursor(7, 3, num_episodes=2)
    sampler = StepSampler(prompts, cursor, batch_size=3, policy=FailurePolicy(3))  # type: ignore[arg-type]
    kl = {"init_coef": coef, "target": target, "horizon": 100}
    state = state_of(PPOConfig.model_validate({"algo": {"kl": kl}}), Path("unused"))
    state.sampler = sampler
    return state


def test_a_line_of_several_steps_has_the_mean_of_their_losses() -> None:
    """Those of a checkpoint too, of before losses were means."""
    state = make()

    def step(**parts: float) -> Metrics:
        metrics = Metrics()
        for name, value in {**parts, "num_generated_tokens": 8}.items():
            metrics.add(name, value, reduction="sum")
        return metrics.merge(metrics)  # of two micro-batches

    state.note_step(step(policy_loss=0.25, moving_s=1.5))
    state.note_step(step(policy_loss=0.5, moving_s=1.5, critic_loss=1.0))
    found = {"policy_loss": 0.75, "moving_s": 3.0, "critic_loss": 2.0, "num_generated_tokens": 32}
    assert state.unlogged.values() == found
    old = state.state_dict()
    old["unlogged"] = {"policy_loss": [1.5, 2.0, "sum"], "num_generated_tokens": [32, 4.0, "sum"]}
    state.load_state_dict(json.loads(json.dumps(old)))
    state.note_step(step(policy_loss=0.0))
    assert state.unlogged.values() == {"policy_loss": 0.5, "num_generated_tokens": 48}


def test_ranks_write_the_model_where_the_command_was_typed_or_name_who_does_not_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    class Rank:
        def call(self, method: Callable, *arguments: object) -> list[int]:
            asked.extend(arguments)
            return [0]

    monkeypatch.chdir(tmp_path)  # that of Ray's workers is another
    names = {"actor": {"model_name_or_path": "m"}, "ckpt": {"output_dir": "out/run"}}
    config = PPOConfig.model_validate(names)
    state_of(config, tmp_path / "ckpt", actor=Rank()).check_room()
    _export(config, {"actor": Rank()})  # type: ignore[dict-item]
    assert [*map(str, asked)] == [str(tmp_path / "out" / "run")] * 2
    rank = SimpleNamespace(rank=0, role="actor", address="10.0.0.3")
    with pytest.raises(
        ConfigError, match=r"run is not seen by actor rank 0 on node 10\.0\.0\.3, w"
    ):
        PolicyModelActor.check_room(rank, str(asked[0]))  # type: ignore[arg-type]


def test_a_constant_kl_coefficient_is_the_commands_an_adapted_one_the_checkpoints() -> None:
    saved = make(coef=0.5).state_dict()
    for target, expected in ((None, 0.2), (0.1, 0.5)):
        found = make(target=target, coef=0.2)
        found.load_state_dict(saved)
        assert found.kl_coef == expected
    off = make(target=0.1, coef=0.2)  # a target does not move 0
    off.load_state_dict(make(coef=0.0).state_dict())
    assert off.kl_coef == 0.2
