"""A run is built of what its flags ask for: models, forwards and the lines it opens with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.commands.rl_inputs import planned_updates, schedule_notices
from openrlhf.commands.train_rl import (
    banner_sections,
    forwards_of,
    init_models,
    run_ppo_local,
    worker_classes,
)
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.trainer.ppo_utils.demands import ClusterView, role_demands
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import make_experience
from openrlhf.utils.rollout import Rollout
from tests.helpers.configs import rl_config
from tests.helpers.rollouts import rollout

LAPTOP = ClusterView(num_gpus=0, num_cpus=2, max_gpus_per_node=0)
NODE = ClusterView(num_gpus=8, num_cpus=64, max_gpus_per_node=8)
SIZES = {"actor": 3_300_000, "ref": 3_300_000, "reward1": 950, "reward2": 950, "critic": 7_200_000}


def banner(
    flags: str, cluster: ClusterView, num_prompts: int = 100
) -> tuple[dict[str, object], dict[str, object]]:
    """The sections of a command's banner: models, run."""
    line = f"--pretrain /m/policy --prompt_data d --save_path out {flags}"  # maybe no reward
    config = parse_config(PPOConfig, line.split()).config
    demands = role_demands(config, cluster)
    placed: Any = SimpleNamespace(demands=demands, view=cluster, policy_dtype=torch.float32)
    sizes = {demand.role: SIZES[demand.role] for demand in demands if demand.role in SIZES}
    updates = planned_updates(config, num_prompts)
    inputs: Any = SimpleNamespace(
        updates=updates,
        prompts=range(num_prompts),
        eval_prompts=range(5),
        eval_sampling=SimpleNamespace(num_samples=4),
    )
    sections = banner_sections(config, inputs, placed, sizes)
    return dict(sections["models"]), dict(sections["run"])


def test_every_model_is_named_with_its_size_its_ranks_and_its_place() -> None:
    models, run = banner(
        "--reward_pretrain /m/a,/m/b --reward_weights 1 0.5 --colocate_actor_ref "
        "--actor_num_gpus_per_node 2 --critic_num_gpus_per_node 1 --reward_num_gpus_per_node 1 "
        "--vllm_num_engines 1 --vllm_tensor_parallel_size 2",
        NODE,
    )
    assert models == {
        "actor": "/m/policy: 3.3M parameters, 2 rank(s), devices: actor",
        "ref": "/m/policy: 3.3M parameters, 2 rank(s), devices: actor",
        "reward1": "/m/a: 950 parameters, 1 rank(s), devices: reward1",
        "reward2": "/m/b: 950 parameters, 1 rank(s), devices: reward2",
        "critic": "/m/a: 7.2M parameters, 1 rank(s), devices: critic",
        "generation": "1 x vLLM of 2 device(s) each, devices: vllm",
    }
    assert run["reward"] == "/m/a, /m/b"
    assert run["devices"] == "8 GPU(s), 64 core(s)"
    assert run["evaluation"] == "5 prompts x 4 samples"


def test_a_set_smaller_than_the_batch_is_what_a_step_takes() -> None:
    line = "--remote_rm_url r.py --advantage_estimator rloo --n_samples_per_prompt 2 "
    line += "--rollout_batch_size 8 --train_batch_size 8"
    for num_prompts, batch, steps in (
        (4, "4 prompts x 2 samples = 8; 1 update(s) of 8 samples a step", "1 (4 prompts"),
        (11, "8 prompts x 2 samples = 16; 2 update(s) of 8 samples a step", "2 (11 prompts"),
        (
            7,
            "7 prompts x 2 samples = 14; 2 update(s) of 8 samples a step, the last of 6",
            "1 (7 prompts",
        ),
    ):
        _, run = banner(line, LAPTOP, num_prompts)
        assert run["batch"] == batch
        assert run["steps"] == f"{steps} x 1 episode(s))"


def test_train_ppo_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="started as 2 processes, and trains in one"):
        run_ppo_local(rl_config())
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="Type openrlhf ppo, or leave --async_train out"):
        run_ppo_local(rl_config("--async_train"))


BATCHES = "--rollout_batch_size 4 --train_batch_size 4 "


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


def experience_of(flags: str, rollouts: Sequence[Rollout], **groups: FakeGroup) -> Experience:
    """What the run's experience maker makes of samples; groups by role."""
    config, all_groups = rl_config(BATCHES + flags), {"actor": FakeGroup(), **groups}
    forwards = forwards_of(config, all_groups, max(planned_updates(config, 4)))  # type: ignore[arg-type]
    return make_experience(config, forwards, rollouts, config.algo.kl.init_coef)[0]


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
    reference = {"ref": FakeGroup([-2.0, -1.0])} if rl_config(BATCHES + flags).has_reference else {}
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
    config = rl_config(BATCHES + flags)
    groups = {role: FakeGroup([-1.0, -2.0]) for role in worker_classes(config)}
    rollouts = [rollout([1], [2], reward=0.0), rollout([1], [3], reward=4.0)]
    experience_of(flags, rollouts, **groups)
    assert {role: len(group.asked) for role, group in groups.items()} == expected


@pytest.mark.parametrize(
    ("flags", "num_updates"),
    [
        ("--advantage_estimator rloo --freezing_actor_steps 4", 10),  # no critic that warms up
        ("--advantage_estimator gae --freezing_actor_steps 4", 6),
    ],
)
def test_the_rate_falls_over_the_updates_of_the_policy(flags: str, num_updates: int) -> None:
    group: Any = FakeGroup()
    config, phases = rl_config(BATCHES + flags), SimpleNamespace(put_away=lambda group: None)
    init_models(config, {"actor": group}, [1] * 10, phases)  # type: ignore[arg-type]
    assert group.model_args == (num_updates,)


def test_every_update_after_the_first_has_old_log_probs_where_prompts_are_replaced() -> None:
    flags = "--advantage_estimator group_norm --n_samples_per_prompt 2 --init_kl_coef 0 "
    batches = "--rollout_batch_size 8 --train_batch_size 8 --num_episodes 6"
    config, group = rl_config(f"{flags} {batches} --dynamic_filtering"), FakeGroup()
    updates = planned_updates(config, 4)  # a step takes up prompts of the next episode
    assert updates == [2, 2, 2]
    assert list(forwards_of(config, {"actor": group}, max(updates))) == ["old_logprobs"]  # type: ignore[dict-item]
    [said] = schedule_notices(config, updates)
    assert said.startswith("--dynamic_filtering: at most 3 steps, over which the learning rate")


def test_a_policy_that_is_never_trained_is_said() -> None:
    config = rl_config(f"{BATCHES} --advantage_estimator gae --freezing_actor_steps 3")
    assert list(schedule_notices(config, [1, 1, 1, 1])) == []
    [said] = schedule_notices(config, [1, 1, 1])
    assert said == "--freezing_actor_steps 3 of 3 steps: the policy is not trained."
