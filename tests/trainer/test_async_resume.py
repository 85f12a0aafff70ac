"""An asynchronous run that was ended goes on: finished samples are kept to the token, what was on
its way is generated again, nothing is lost, done twice or too old.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.checkpoints import CheckpointStore, DataFacts, RunCheckpoints
from openrlhf.rollout.rollout import FinishedGroup
from openrlhf.rollout.rollout_queue import KeptGroup, read_groups, sample_origin, write_groups
from openrlhf.trainer.ppo_checkpoints import PPOCheckpoints
from openrlhf.trainer.ppo_trainer_async import PPOTrainerAsync, reward_origin
from openrlhf.trainer.ray.phases import DevicePhases
from openrlhf.utils.metrics import Metrics
from tests.trainer.async_fakes import (
    TrainerBroke,
    World,
    make_trainer,
)


def run_until(trainer: PPOTrainerAsync, step: int, folder: Path) -> dict:
    """The state after a step of a run that breaks later, its files in a folder; empty when the run
    was over before.
    """
    saved = {}
    settle = trainer.queue.settle

    def settle_and_save(trained_groups: set[int]) -> None:
        settle(trained_groups)
        if trainer.state.global_step == step:
            groups = trainer.queue.finished_groups()
            time.sleep(0.001)  # the engines go on meanwhile
            saved.update(json.loads(json.dumps(trainer.state.state_dict())))
            write_groups(folder, groups, trainer.queue.origin)

    trainer.queue.settle = settle_and_save  # type: ignore[method-assign]
    with suppress(TrainerBroke):
        trainer.fit()
    return saved


def go_on(trainer: PPOTrainerAsync, saved: dict, folder: Path) -> None:
    trainer.state.load_state_dict(saved)
    trainer.queue.load_groups(folder)
    trainer.fit()


def kept_of(trainer: PPOTrainerAsync, folder: Path, **sampling: object) -> list[KeptGroup]:
    changed = replace(trainer.inputs.sampling, **sampling)  # type: ignore[arg-type]
    origin = sample_origin(changed, trainer.queue.origin["reward"])
    return read_groups(folder, trainer.inputs.prompts, origin)


def test_finished_samples_are_kept_to_the_token(tmp_path: Path) -> None:
    world = World(train_error_at=3, keeps_running=True, train_s=0.05)
    trainer = make_trainer(world, num_prompts=24, queue_size=2, num_at_once=12)
    taken = []
    outcome = trainer.sampler.outcome_of

    def noted(group: FinishedGroup, metrics: Metrics) -> str | None:
        taken.append(group)
        return outcome(group, metrics)

    trainer.sampler.outcome_of = noted  # type: ignore[method-assign]
    saved = run_until(trainer, 3, tmp_path)
    made = {group.key: group.rollouts for group in taken}
    kept = kept_of(trainer, tmp_path)
    assert len(kept) >= 8 and {group.age for group in kept} >= {1, 2}
    pending = {tuple(key) for key in saved["sampler"]["ledger"]["pending"]}
    assert {group.key for group in kept} <= pending
    for group in kept:
        assert len(group.rollouts) == 2
        for found, rollout in zip(group.rollouts, made[group.key], strict=True):
            row = group.key[1]
            assert (found.label, found.columns) == (f"label {row}", {"row": row})
            for name, value in vars(replace(rollout, group_id=0)).items():
                if name in ("token_ids", "action_mask", "logprobs", "weight_versions"):
                    assert getattr(found, name).equal(value)
                elif name not in ("label", "columns", "datasource"):  # of the data set
                    assert getattr(found, name) == value, name


def test_samples_that_would_be_made_in_another_way_now_are_not_taken_up(tmp_path: Path) -> None:
    trainer = make_trainer(World(train_error_at=1, train_s=0.02), num_prompts=24)
    run_until(trainer, 1, tmp_path)
    assert kept_of(trainer, tmp_path)
    assert not kept_of(trainer, tmp_path, temperature=0.5)
    trainer.queue.origin["reward"]["remote_url"] = "other.py"
    assert not kept_of(trainer, tmp_path)


def test_samples_that_edited_code_would_reward_otherwise_are_made_again(tmp_path: Path) -> None:
    code = tmp_path / "reward.py"
    line = ["--pretrain", "m", "--prompt_data", "d", "--save_path", "s", "--async_train"]
    line += ["--train_batch_size", "64", "--rollout_batch_size", "64", "--remote_rm_url", str(code)]
    code.write_text("def reward_func(queries, prompts, labels): ...\n")
    config = parse_config(PPOConfig, line).config
    before = reward_origin(config)
    assert reward_origin(config) == before
    code.write_text("def reward_func(queries, prompts, labels): return 1\n")
    assert reward_origin(config) != before


def test_a_checkpoint_holds_what_was_made_ahead_and_damage_to_it_is_seen(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)

    def checkpoints() -> PPOCheckpoints:
        config = PPOConfig.model_validate({"ckpt": {"save_steps": 1, "path": str(tmp_path)}})
        phases = DevicePhases([], engines_sleep=False, training_sleeps=False)
        opened = RunCheckpoints(config.ckpt, DataFacts("f", 24), store.latest())
        return PPOCheckpoints(opened, {}, phases, best_metric=None)

    trainer = make_trainer(World(train_error_at=2, train_s=0.02), num_prompts=24)
    first = checkpoints()
    trainer.checkpoints.is_due = first.is_due
    trainer.checkpoints.save = first.save
    with suppress(TrainerBroke):
        trainer.fit()
    world = World(policy_version=2)
    again = make_trainer(world, num_prompts=24)
    checkpoints().resume(again.state)
    kept = kept_of(trainer, tmp_path / "global_step2")
    assert kept and [group.key for group in again.queue._kept] == [group.key for group in kept]
    again.fit()
    assert again.sampler.ledger.outcomes == {"trained": 24}
    assert not {group.key for group in kept} & set(world.submitted)
    with (tmp_path / "global_step2" / "finished_groups.json").open("a") as file:
        file.write(" ")
    saved = store.latest()
    assert saved is not None and saved.step == 1
