"""What is typed is what an RL run computes with: from a command line to numbers worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.trainer.ppo_run import worker_classes
from openrlhf.trainer.ppo_setup import planned_updates
from openrlhf.trainer.ppo_trainer import forwards_of
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.replay_buffer import UpdateStep
from openrlhf.trainer.ray.cluster import engine_config
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.trainer.ray.ppo_critic import CriticModelActor
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout
from tests.trainer.test_experience import rollout


def config_of(flags: str, *, pretrain: Path | str = "m") -> PPOConfig:
    """The configuration of a command with four prompts a step and four samples an update."""
    line = f"--pretrain {pretrain} --prompt_data d --remote_rm_url r.py "
    line += f"--rollout_batch_size 4 --train_batch_size 4 {flags}"
    return parse_config(PPOConfig, line.split()).config


@dataclass
class FakeGroup:
    """One rank that answers every forward with the same column; notes what it is asked."""

    column: Sequence[float] = ()
    asked: list[str] = field(default_factory=list)
    num_shares: int = 1

    def start(
        self, method: Callable[..., Any], shares: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        self.asked.append(method.__name__)
        return lambda: [torch.tensor(self.column)]


def maker_of(config: PPOConfig, groups: dict[str, Any]) -> RemoteExperienceMaker:
    return RemoteExperienceMaker(
        config, forwards_of(config, groups, max(planned_updates(config, 4)))
    )


def experience_of(flags: str, rollouts: Sequence[Rollout], **groups: FakeGroup) -> Experience:
    """What the run's experience maker makes of samples; groups by role."""
    config = config_of(flags)
    experience, _ = maker_of(config, {"actor": FakeGroup(), **groups}).make_experience_batch(
        rollouts, config.algo.kl.init_coef
    )
    return experience


THREE_TOKENS = [rollout([1], [2, 3, 4], reward=8.0)]
TWO_TOKENS = [rollout([1], [2, 3], reward=8.0)]
TWO_GROUPS = [rollout([1], [2], reward=8.0), rollout([1], [3], reward=-18.0, group=1)]
CLIPPED, K3 = "--reward_clip_range -1 2", "--init_kl_coef 0.1 --kl_estimator k3"
RETURNS = [  # flags, samples, returns of REINFORCE
    ("--init_kl_coef 0", THREE_TOKENS, [8, 8, 8]),
    ("--init_kl_coef 0 --gamma 0.5", THREE_TOKENS, [2, 4, 8]),
    ("--init_kl_coef 0", TWO_GROUPS, [8, -10]),  # within -10 and 10
    (f"--init_kl_coef 0 {CLIPPED}", TWO_GROUPS, [2, -1]),
    # The log-prob ratio to the reference is 1 at the first token, 0 at the second.
    ("", TWO_TOKENS, [8 - 0.01 * 1, 8]),
    ("--init_kl_coef 0.1 --kl_estimator k1", TWO_TOKENS, [8 - 0.1 * 1, 8]),
    ("--init_kl_coef 0.1 --kl_estimator k2", TWO_TOKENS, [8 - 0.1 * 0.5, 8]),
    (K3, TWO_TOKENS, [8 - 0.1 * math.exp(-1), 8]),
    ("--init_kl_coef 0.25 --use_kl_loss", TWO_TOKENS, [8, 8]),  # left to the update
]


@pytest.mark.parametrize(("flags", "rollouts", "expected"), RETURNS)
def test_returns(flags: str, rollouts: list[Rollout], expected: list[float]) -> None:
    flags = f"--advantage_estimator reinforce {flags}"
    reference = {"ref": FakeGroup([-2.0, -1.0])} if config_of(flags).has_reference else {}
    experience = experience_of(flags, rollouts, actor=FakeGroup([-1.0, -1.0]), **reference)
    assert experience.returns is not None
    assert experience.returns.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # deltas 4, -2, 6; advantages 8, 4, 6 before they are normalised
        ("", [8, 8, 8]),
        # deltas 4, -2, 6; advantages 4.5, 1, 6
        ("--lambd 0.5", [4.5, 5, 8]),
        # deltas 2, -3, 6; advantages 2 - 0.4 * 0.6, -3 + 0.4 * 6, 6
        ("--gamma 0.5 --lambd 0.8", [1.76, 3.4, 8]),
    ],
)
def test_discount_and_lambda_of_gae(flags: str, expected: list[float]) -> None:
    critic = FakeGroup([0.0, 4.0, 2.0])
    experience = experience_of(f"--init_kl_coef 0 {flags}", THREE_TOKENS, critic=critic)
    assert experience.returns is not None
    assert experience.returns.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("reinforce", [-1, 1]),  # over the standard deviation of the batch, 2
        ("reinforce --no_advantage_std_norm", [-2, 2]),
        ("group_norm", [-math.sqrt(0.5), math.sqrt(0.5)]),  # over that of the group, sqrt(8)
        ("group_norm --no_advantage_std_norm", [-2, 2]),
    ],
)
def test_advantages_are_divided_by_a_deviation_or_not(flags: str, expected: list[float]) -> None:
    rollouts = [rollout([1], [2], reward=0.0), rollout([1], [3], reward=4.0)]
    policy = FakeGroup([-1.0, -1.0])
    flags = f"--init_kl_coef 0 --advantage_estimator {flags}"
    experience = experience_of(flags, rollouts, actor=policy)
    assert experience.advantages is not None
    assert experience.advantages.tolist() == pytest.approx(expected)


WITH_KL, WITHOUT_KL = "--init_kl_coef 0.1", "--init_kl_coef 0"


@pytest.mark.parametrize(
    ("flags", "expected"),  # the forwards of each model that the run has
    [
        (f"--advantage_estimator reinforce {WITHOUT_KL}", {"actor": 0}),
        (f"--advantage_estimator reinforce {WITHOUT_KL} --max_epochs 2", {"actor": 1}),
        (f"--advantage_estimator reinforce {WITH_KL}", {"actor": 1, "ref": 1}),
        (f"--advantage_estimator reinforce {WITH_KL} --use_kl_loss", {"actor": 0, "ref": 1}),
        (WITHOUT_KL, {"actor": 0, "critic": 1}),
        (f"{WITH_KL} --use_kl_loss", {"actor": 0, "critic": 1, "ref": 1}),
    ],
)
def test_forwards_that_nobody_needs_are_not_made(flags: str, expected: dict[str, int]) -> None:
    config = config_of(flags)
    groups = {role: FakeGroup([-1.0, -2.0]) for role in worker_classes(config)}
    rollouts = [rollout([1], [2], reward=0.0), rollout([1], [3], reward=4.0)]
    maker_of(config, groups).make_experience_batch(rollouts, config.algo.kl.init_coef)
    assert {role: len(group.asked) for role, group in groups.items()} == expected


@pytest.mark.parametrize(("flags", "expected"), [("", False), ("--n_samples_per_prompt 2", True)])
def test_an_engine_keeps_the_prefix_of_a_prompt_for_its_samples(flags: str, expected: bool) -> None:
    config = config_of(flags)
    assert engine_config(config, dtype=torch.float32).enable_prefix_caching is expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", [-1.2, 0.8, 4]),
        ("--eps_clip 0.4", [-1.4, 0.6, 4]),
        ("--eps_clip 0.4 --eps_clip_low_high 0.1 0.3", [-1.3, 0.9, 4]),
        ("--dual_clip 3", [-1.2, 0.8, 3]),
    ],
)
def test_the_clip_range_of_the_policy(
    tiny_model_dir: Path, tmp_path: Path, flags: str, expected: list[float]
) -> None:
    worker = PolicyModelActor(config_of(flags, pretrain=tiny_model_dir), "model", "unused")
    worker.setup()
    worker.init_model(num_updates=1)
    losses = []
    # A good token is twice as likely as before, a bad one a tenth, a bad one four times.
    for ratio, advantage in ((2.0, 1.0), (0.1, -1.0), (4.0, -1.0)):
        experience = Experience.from_rollouts([rollout([1], [2])])
        now = worker.compute_logprobs(experience)
        experience = replace(
            experience, advantages=torch.tensor([advantage]), old_logprobs=now - math.log(ratio)
        )
        step = UpdateStep(experience, num_tokens=1, num_samples=1, num_steps=2)
        loss = worker.compute_loss(experience.packed(), experience, step, Metrics())
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("", 2.5**2 / 2), ("--value_clip 1", 2**2 / 2), ("--value_clip 4", 0.5**2 / 2)],
)
def test_the_clip_range_of_values(flags: str, expected: float) -> None:
    # From 0 to 3.5, where 3 is right: off by half, or by what the clipped change leaves.
    worker = CriticModelActor(config_of(flags), "model", "unused")
    worker.engine = lambda batch: torch.tensor([3.5])  # type: ignore[assignment]
    experience = replace(
        Experience.from_rollouts([rollout([1], [2])]),
        values=torch.tensor([0.0]),
        returns=torch.tensor([3.0]),
    )
    step = UpdateStep(experience, num_tokens=1, num_samples=1)
    loss = worker.compute_loss(experience.packed(), experience, step, Metrics())
    assert float(loss) == pytest.approx(expected)
