"""What is typed is what an RL run computes with: from a command line to numbers worked by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.problems import Gathered
from openrlhf.models.actor import TokenStats
from openrlhf.trainer.ppo_run import _experience_maker
from openrlhf.trainer.ppo_setup import _data, make_schedule
from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.replay_buffer import UpdateStep
from openrlhf.trainer.ray.model_actor import RankIdentity
from openrlhf.trainer.ray.phases import DevicePhases
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.trainer.ray.ppo_critic import CriticModelActor
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.rollout import Rollout
from tests.tiny import make_tokenizer, write_jsonl
from tests.trainer.test_experience import rollout

IDENTITY = RankIdentity("model", 0, 1, "unused")


def config_of(
    flags: str, *, pretrain: Path | str = "m", prompt_data: Path | str = "d"
) -> PPOConfig:
    """The configuration of a command with four prompts a step and four samples an update."""
    line = f"--pretrain {pretrain} --prompt_data {prompt_data} --remote_rm_url r.py "
    line += f"--rollout_batch_size 4 --train_batch_size 4 {flags}"
    return parse_config(PPOConfig, line.split()).config


@dataclass
class FakeGroup:
    """One rank that answers every forward with the same column; notes what it is asked."""

    column: Sequence[float] = ()
    asked: list[str] = field(default_factory=list)
    fitted: tuple = ()  # arguments of the last update
    num_shares: int = 1

    def start(
        self, method: Callable[..., Any], shares: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        self.asked.append(method.__name__)
        if method.__name__ == "fit":
            [self.fitted] = shares
            return lambda: [Metrics()]
        return lambda: [torch.tensor(self.column)]


def experience_of(flags: str, rollouts: Sequence[Rollout], **groups: FakeGroup) -> Experience:
    """What the run's experience maker makes of samples; groups by role."""
    config = config_of(flags)
    maker = _experience_maker(config, {"actor": FakeGroup(), **groups}, make_schedule(config, 4))
    experience, _ = maker.make_experience_batch(rollouts, config.algo.kl.init_coef)
    return experience


def returns_of(flags: str, rollouts: Sequence[Rollout], **groups: FakeGroup) -> list[float]:
    returns_N = experience_of(f"{flags} --init_kl_coef 0", rollouts, **groups).returns
    assert returns_N is not None
    return returns_N.tolist()


THREE_TOKENS = [rollout([1], [2, 3, 4], reward=8.0)]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", [8, 8, 8]),
        ("--gamma 0.5", [2, 4, 8]),
    ],
)
def test_the_discount(flags: str, expected: list[float]) -> None:
    assert returns_of(f"--advantage_estimator reinforce {flags}", THREE_TOKENS) == expected


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
    assert returns_of(flags, THREE_TOKENS, critic=critic) == pytest.approx(expected)


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


@pytest.mark.parametrize(
    ("flags", "expected"), [("", [8, -10]), ("--reward_clip_range -1 2", [2, -1])]
)
def test_the_bounds_of_the_reward(flags: str, expected: list[float]) -> None:
    rollouts = [rollout([1], [2], reward=8.0), rollout([1], [3], reward=-18.0, group=1)]
    assert returns_of(f"--advantage_estimator reinforce {flags}", rollouts) == expected


TWO_TOKENS = [rollout([1], [2, 3], reward=8.0)]


@pytest.mark.parametrize(
    ("estimator", "first_kl"), [("k1", 1.0), ("k2", 0.5), ("k3", math.exp(-1))]
)
def test_the_kl_estimator_of_the_reward(estimator: str, first_kl: float) -> None:
    flags = f"--advantage_estimator reinforce --init_kl_coef 0.1 --kl_estimator {estimator}"
    policy, reference = FakeGroup([-1.0, -1.0]), FakeGroup([-2.0, -1.0])
    experience = experience_of(flags, TWO_TOKENS, actor=policy, ref=reference)
    assert experience.returns is not None
    assert experience.returns.tolist() == pytest.approx([8 - 0.1 * first_kl, 8])


@pytest.mark.parametrize(
    ("flags", "coef", "expected"),
    [
        ("", 0.01, [7.99, 8]),
        ("--init_kl_coef 0.25", 0.25, [7.75, 8]),
        ("--init_kl_coef 0.25 --use_kl_loss", 0.25, [8, 8]),  # left to the update
    ],
)
def test_the_kl_coefficient_of_reward_and_update(
    flags: str, coef: float, expected: list[float]
) -> None:
    config = config_of(f"--advantage_estimator reinforce {flags}")
    policy, reference = FakeGroup([-1.0, -1.0]), FakeGroup([-2.0, -1.0])
    groups: Any = {"actor": policy, "ref": reference}
    parts = SimpleNamespace(
        actor=policy,
        critic=None,
        engines=[],
        experience_maker=_experience_maker(config, groups, make_schedule(config, 4)),
        phases=DevicePhases([], engines_sleep=False, training_sleeps=False),
        prompts=[None] * 4,
        group_filter=None,
        texts=None,
        max_mismatch_kl=1.0,
    )
    PPOTrainer(config, parts).train_step(TWO_TOKENS, global_step=1)  # type: ignore[arg-type]
    [step], given_coef = policy.fitted
    assert given_coef == coef
    assert step.experience.returns.tolist() == pytest.approx(expected)


class FakeEngine:
    """A training engine whose model gives the targets these numbers, or 0 each; notes the lengths
    of the samples of every forward.
    """

    device, lr = torch.device("cpu"), 0.0

    def __init__(self, numbers: Sequence[float] | None = None, *, is_policy: bool) -> None:
        self.numbers = numbers
        self.is_policy = is_policy
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, batch: PackedBatch, **options: object) -> Tensor | TokenStats:
        self.seen.append(batch.seq_lengths)
        answer = torch.tensor(self.numbers or [0.0] * len(batch.targets))
        return TokenStats(answer) if self.is_policy else answer

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def backward(self, loss: Tensor, *, is_last_micro_batch: bool) -> None: ...

    def step(self) -> float:
        return 1.0


@dataclass
class FakeStrategy:
    """One rank, whose engine is the test's."""

    engine: FakeEngine

    def prepare_train(self, model: object, optim: object, *, num_updates: int) -> FakeEngine:
        return self.engine

    def all_reduce_max(self, values: Mapping[str, float]) -> Mapping[str, float]:
        return values


def make_policy(flags: str, model: Path) -> PolicyModelActor:
    worker = PolicyModelActor(config_of(flags, pretrain=model), IDENTITY)
    worker.strategy = FakeStrategy(FakeEngine(is_policy=True))  # type: ignore[assignment]
    worker.init_model(num_updates=1)
    return worker


def make_critic(flags: str, numbers: Sequence[float] | None = None) -> CriticModelActor:
    worker = CriticModelActor(config_of(flags), IDENTITY)
    worker.engine = FakeEngine(numbers, is_policy=False)  # type: ignore[assignment]
    worker.strategy = FakeStrategy(worker.engine)  # type: ignore
    return worker


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", [-1.2, 0.8, 4]),
        ("--eps_clip 0.4", [-1.4, 0.6, 4]),
        ("--eps_clip_low_high 0.1 0.3", [-1.3, 0.9, 4]),
        ("--eps_clip 0.4 --eps_clip_low_high 0.1 0.3", [-1.3, 0.9, 4]),
        ("--dual_clip 3", [-1.2, 0.8, 3]),
    ],
)
def test_the_clip_range_of_the_policy(
    tiny_model_dir: Path, flags: str, expected: list[float]
) -> None:
    worker: Any = make_policy(flags, tiny_model_dir)
    losses = []
    # A good token is twice as likely as before, a bad one a tenth, a bad one four times.
    for ratio, advantage in ((2.0, 1.0), (0.1, -1.0), (4.0, -1.0)):
        worker.engine.numbers = [-5 + math.log(ratio)]
        experience = Experience.from_rollouts([rollout([1], [2])]).with_columns(
            advantages=torch.tensor([advantage]), old_logprobs=torch.tensor([-5.0])
        )
        step = UpdateStep(experience, num_tokens=1, num_samples=1, num_steps=2)
        loss = worker.compute_loss(experience.packed(), experience, step, Metrics())
        losses.append(float(loss))
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("", 2.5**2 / 2), ("--value_clip 1", 2**2 / 2), ("--value_clip 4", 0.5**2 / 2)],
)
def test_the_clip_range_of_values(flags: str, expected: float) -> None:
    # From 0 to 3.5, where 3 is right: off by half, or by what the clipped change leaves.
    worker = make_critic(flags, [3.5])
    experience = Experience.from_rollouts([rollout([1], [2])]).with_columns(
        values=torch.tensor([0.0]), returns=torch.tensor([3.0])
    )
    step = UpdateStep(experience, num_tokens=1, num_samples=1)
    loss = worker.compute_loss(experience.packed(), experience, step, Metrics())
    assert float(loss) == pytest.approx(expected)


BY_COUNT = "--micro_rollout_batch_size 3 --micro_train_batch_size 2"
BY_TOKENS = "--use_dynamic_batch --train_max_tokens_per_gpu 6"


@pytest.mark.parametrize(
    ("flags", "of_forwards", "of_updates"),
    [
        ("--micro_rollout_batch_size 4 --micro_train_batch_size 1", [4, 2], [1] * 6),
        (f"{BY_TOKENS} --rollout_max_tokens_per_gpu 9", [3, 3], [2, 2, 2]),
    ],
)
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_forwards_and_updates_are_cut_so(
    tiny_model_dir: Path, role: str, flags: str, of_forwards: list[int], of_updates: list[int]
) -> None:
    """The samples have three tokens each."""
    columns = dict.fromkeys(("advantages", "old_logprobs", "values", "returns"), torch.ones(12))
    experience = Experience.from_rollouts([rollout([1], [2, 3])] * 6).with_columns(**columns)
    steps = [UpdateStep(experience, num_tokens=12, num_samples=6)]
    worker: Any = make_policy(flags, tiny_model_dir) if role == "policy" else make_critic(flags)
    forward = worker.compute_logprobs if role == "policy" else worker.compute_values
    assert len(forward(experience)) == 12
    assert worker.engine.seen == [(3,) * count for count in of_forwards]
    worker.engine.seen.clear()
    worker.fit(steps, 0.0) if role == "policy" else worker.fit(steps)
    assert worker.engine.seen == [(3,) * count for count in of_updates]


def test_prompts_are_drawn_with_their_probabilities(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    first, second = (
        write_jsonl(tmp_path / f"{name}.jsonl", [{"input": f"{name}{k}"} for k in range(40)])
        for name in ("a", "b")
    )

    def origins(flags: str) -> tuple[Counter[str], Counter[str]]:
        """Of the prompts, and of those of the evaluation."""
        flags += f" --eval_dataset {second}"
        config = config_of(flags, prompt_data=f"{first},{second}")
        prompts, eval_prompts, _ = _data(config, tokenizer, Gathered())
        assert eval_prompts is not None
        both = [[prompt.prompt_text[0] for prompt in part] for part in (prompts, eval_prompts)]
        return Counter(both[0]), Counter(both[1])

    assert origins("") == ({"a": 40, "b": 40}, {"b": 40})
    # Drawn until one of them is used up.
    blended, of_evaluation = origins("--prompt_data_probs 0.9,0.1")
    assert blended["a"] == 40 and 0 < blended["b"] < 12
    assert of_evaluation == {"b": 40}
