"""Work that nobody needs is not done: old log-probs on-policy, forwards of models without a use, a
prompt's prefix once more for each of its samples.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.trainer.ppo_run import _experience_maker, _start_groups
from openrlhf.trainer.ppo_setup import make_schedule, only_busy_samples_count
from openrlhf.trainer.ray.cluster import engine_config
from tests.trainer.test_experience import rollout
from tests.trainer.test_ppo_wiring import FakeGroup, config_of

WITH_KL = "--init_kl_coef 0.1"
WITHOUT_KL = "--init_kl_coef 0"


@pytest.mark.parametrize(
    ("flags", "of_policy", "of_critic", "of_reference"),
    [
        (f"--advantage_estimator reinforce {WITHOUT_KL}", [], None, None),
        (f"--advantage_estimator reinforce {WITHOUT_KL} --max_epochs 2", ["logprobs"], None, None),
        (f"--advantage_estimator reinforce {WITH_KL}", ["logprobs"], None, ["logprobs"]),
        (f"--advantage_estimator reinforce {WITH_KL} --use_kl_loss", [], None, ["logprobs"]),
        (WITHOUT_KL, [], ["values"], None),
        (f"{WITHOUT_KL} --max_epochs 2", ["logprobs"], ["values"], None),
        (WITH_KL, ["logprobs"], ["values"], ["logprobs"]),
        (f"{WITH_KL} --use_kl_loss", [], ["values"], ["logprobs"]),
    ],
)
def test_forwards_of_a_step(
    flags: str,
    of_policy: list[str],
    of_critic: list[str] | None,
    of_reference: list[str] | None,
) -> None:
    """None: the run has no such model."""
    config = config_of(flags)
    started = SimpleNamespace(start_group=lambda role, worker: FakeGroup([-1.0, -2.0]))
    groups: Any = _start_groups(config, started)  # type: ignore[arg-type]
    maker = _experience_maker(config, groups, make_schedule(config, 4))
    rollouts = [rollout([1], [2], reward=0.0), rollout([1], [3], reward=4.0)]
    experience, _ = maker.make_experience_batch(rollouts, config.algo.kl.init_coef)
    expected = {"actor": of_policy, "critic": of_critic, "ref": of_reference}
    assert {role: group.asked for role, group in groups.items()} == {
        role: [f"compute_{what}" for what in whats]
        for role, whats in expected.items()
        if whats is not None
    }
    assert (experience.old_logprobs is None) is (not of_policy)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--advantage_estimator reinforce --init_kl_coef 0", True),
        ("--advantage_estimator reinforce --init_kl_coef 0 --entropy_loss_coef 0", False),
        ("--advantage_estimator reinforce --init_kl_coef 0 --entropy_loss_coef 0.1", False),
        ("--advantage_estimator reinforce --init_kl_coef 0 --aux_loss_coef 0.1", False),
        ("--advantage_estimator reinforce --init_kl_coef 0.1 --use_kl_loss", False),
        ("--advantage_estimator gae --init_kl_coef 0", False),
    ],
)
def test_whether_samples_without_an_advantage_are_left_out(flags: str, expected: bool) -> None:
    config = config_of(flags)
    assert only_busy_samples_count(config) is expected
    groups: Any = {"actor": FakeGroup()}
    maker = _experience_maker(config, groups, make_schedule(config, 4))
    assert maker.forwards.only_busy is expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", False),
        ("--enable_prefix_caching", True),
        ("--n_samples_per_prompt 2", True),
        ("--advantage_estimator group_norm", True),  # eight samples
    ],
)
def test_whether_an_engine_keeps_the_prefixes_of_prompts(flags: str, expected: bool) -> None:
    config = config_of(flags)
    assert engine_config(config, dtype=torch.float32).enable_prefix_caching is expected
