"""Workers say how far they are, over micro-batches: in their process or on another's screen."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from openrlhf.config.ppo import PPOConfig
from openrlhf.trainer.ppo_utils.replay_buffer import plan_updates
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.model_actor import ModelWorker
from openrlhf.trainer.ray.placement import RoleDemand, place, view_cluster
from openrlhf.trainer.ray.scorers import ReferenceModelActor
from openrlhf.utils.progress_relay import ProgressRelay
from tests.bars import Recorder, until
from tests.trainer.small_run import make_trainer
from tests.trainer.test_policy_updates import make_actor, ragged_experience


def test_forwards_and_updates_count_their_micro_batches(
    tiny_model_dir: Path, tmp_path: Path, show_bars_on
) -> None:
    train, rollout = {"micro_batch_size": 1}, {"micro_batch_size": 1}
    actor = make_actor(tiny_model_dir, tmp_path, train=train, rollout=rollout)
    display = Recorder()
    show_bars_on(display)
    experience = ragged_experience(32)
    actor.compute_logprobs(experience)
    [steps] = plan_updates(experience, 1, train_batch_size=16, max_epochs=1, seed=0)
    actor.fit(steps, 0.0)
    for what in ("log-probs of the policy", "updating the policy"):
        assert (what, 32, 32) in display.shown  # 16 of each of two optimizer steps
    assert not display.open


def test_a_supervised_step_counts_its_micro_batches(tmp_path: Path, show_bars_on) -> None:
    trainer = make_trainer({"zero_stage": 0}, tmp_path, None, 1)
    display = Recorder()
    show_bars_on(display)
    compute_loss = trainer.compute_loss

    def slow_loss(*args: object) -> object:
        until(display.appeared.is_set)
        return compute_loss(*args)

    trainer.compute_loss = slow_loss  # type: ignore[method-assign]
    trainer.train_step(range(8))
    assert display.shown[-1] == ("step 1", 4, 4)


@pytest.mark.slow
def test_the_first_rank_of_a_role_draws_on_the_controllers_terminal(
    ray_cluster: None, tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = PPOConfig.model_validate({"actor": {"model_name_or_path": str(tiny_model_dir)}})
    slots = place([RoleDemand("ref", 2, "ref")], view_cluster())["ref"]
    group = RayActorGroup(ReferenceModelActor, (config,), slots, role="ref", run_dir=str(tmp_path))
    display = Recorder()
    relay = ProgressRelay(display)
    try:
        group.join()
        group.call(ModelWorker.show_bars_at, relay.address)
        group.call(ReferenceModelActor.init_model)
        until(lambda: f"loading {tiny_model_dir.name}" in display.descriptions)
        until(lambda: not display.open)
    finally:
        relay.close()
        for handle in group.handles:
            ray.kill(handle)
        remove_placement_group(slots[0].group)
