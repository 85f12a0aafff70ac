"""Settings of RL whose effect shows only in a whole run, on the Hugging Face engine."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest

from openrlhf.algorithms.kl import adaptive_kl_coef
from tests.integration.ppo_runs import PPO, make_inputs, start, steps_of


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("ppo_knobs"))


@pytest.fixture(scope="module")
def ppo(root: Path) -> Path:
    """Three steps of PPO; the policy is frozen in the first."""
    flags = (
        f"{PPO} --init_kl_coef 0.05 --kl_target 0.01 --kl_horizon 50 --max_epochs 2 "
        "--freezing_actor_steps 1 --save_value_network --critic_pretrain {root}/reward_model "
        "--lr_scheduler constant --reward_clip_range -10 10 "
        "--overlong_buffer_len 4 --overlong_penalty_factor 3"
    )
    assert start(root, root / "ppo", flags) == 0
    return root / "ppo"


def test_the_first_steps_train_the_critic_alone(ppo: Path) -> None:
    steps = steps_of(ppo)
    assert ["policy_loss" in step for step in steps] == [False, True, True]
    assert all("critic_loss" in step for step in steps)
    versions = [
        pandas.read_parquet(ppo / "rollouts" / f"step_{step:06d}.parquet").weight_version.unique()
        for step in (1, 2, 3)
    ]
    # The second step still samples from the policy as it was at the start.
    assert [list(found) for found in versions] == [[0], [0], [1]]


def test_the_kl_coefficient_follows_the_measured_kl(ppo: Path) -> None:
    coef = 0.05
    for step, num_samples in zip(steps_of(ppo), (8, 8, 6), strict=True):
        coef = adaptive_kl_coef(coef, step["kl"], target=0.01, horizon=50, num_samples=num_samples)
        assert step["kl_coef"] == pytest.approx(coef, rel=1e-9)
    assert coef != pytest.approx(0.05, rel=1e-3)
