"""Loops over micro-batches have a bar, in this process or from the health of a rank on Ray."""

from __future__ import annotations

import io
from pathlib import Path

from openrlhf.trainer.ppo_utils.replay_buffer import plan_updates
from tests.trainer.small_run import make_trainer
from tests.trainer.test_policy_updates import make_actor, ragged_experience


def test_forwards_and_updates_count_their_micro_batches(
    tiny_model_dir: Path, tmp_path: Path, terminal: io.StringIO
) -> None:
    train, rollout = {"micro_batch_size": 1}, {"micro_batch_size": 1}
    actor = make_actor(tiny_model_dir, tmp_path, train=train, rollout=rollout)
    experience = ragged_experience(32)
    actor.compute_logprobs(experience)
    assert actor.health().done_of == (32, 32)
    [steps] = plan_updates(experience, 1, train_batch_size=16, max_epochs=1, seed=0)
    actor.fit(steps, 0.0)
    assert actor.health().done_of == (32, 32)  # 16 of each of two optimizer steps
    for text in ("log-probs of the policy", "updating the policy", "32/32"):
        assert text in terminal.getvalue()


def test_a_supervised_step_counts_its_micro_batches(tmp_path: Path, terminal: io.StringIO) -> None:
    make_trainer({"zero_stage": 0}, tmp_path, None, 1).train_step(range(8))
    assert "step 1" in terminal.getvalue() and "4/4" in terminal.getvalue()
