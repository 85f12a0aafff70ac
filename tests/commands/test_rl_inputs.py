"""What only this machine, the model and the user's code can tell is said before models load."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from openrlhf.commands.rl_inputs import planned_updates, prepare_inputs
from openrlhf.commands.train_rl import forwards_of, run_ppo_local, worker_classes
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.trainer.local_cluster import engine_config, policy_dtype
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import make_experience
from openrlhf.trainer.ppo_utils.update_plan import UpdateStep
from openrlhf.trainer.ray import vllm_engine
from openrlhf.trainer.ray.vllm_engine import create_vllm_engines
from openrlhf.trainer.workers.critic_and_frozen import CriticModelActor
from openrlhf.trainer.workers.policy import PolicyModelActor
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout
from tests.helpers.rollouts import rollout
from tests.tiny import make_model, write_jsonl


def problem(model: Path, folder: Path, flags: str) -> str:
    """What the first check that fails says."""
    data = write_jsonl(folder / "rows.jsonl", [{"input": "q"}])
    words = f"--pretrain {model} --prompt_data {data} --save_path {folder / 'run'} "
    words += f"--remote_rm_url {folder / 'no_reward.py'} {flags}"
    with pytest.raises(ConfigError) as caught:
        prepare_inputs(parse_config(PPOConfig, words.split()).config, has_engines=False)
    return caught.value.problems[0]


def test_lengths_do_not_hide_a_column_that_is_not_there(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", max_position_embeddings=64)
    data = write_jsonl(tmp_path / "data.jsonl", [{"input": "a", "answer": "b"}])
    words = f"--pretrain {model} --prompt_data {data} --remote_rm_url r.py --label_key gold "
    words += "--prompt_max_len 32 --generate_max_len 64 --aux_loss_coef 0.1 --input_key question"
    config = parse_config(PPOConfig, words.split()).config
    with pytest.raises(ConfigError) as caught:
        prepare_inputs(config, has_engines=False)
    experts, lengths, question, gold, reward = caught.value.problems
    assert "32 + --generate_max_len 64 is more than the 64 positions" in lengths
    assert "has no experts" in experts
    assert question.startswith("column 'question' is not in the data set")
    assert gold.startswith("column 'gold' is not in the data set; columns found: input, answer.")
    assert reward.startswith("r.py is not a Python file that exists")


OWN_CODE = """
from openrlhf.utils.agent import AgentInstanceBase

def two(first, second):
    return first

def three(first, second, third):
    return first

class Game(AgentInstanceBase):
    async def step(self, observation, action):
        return {}
"""


def test_functions_of_the_users_are_held_against_their_calls_before_models_load(
    refuse: Callable, tiny_model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_CODE)
    data = write_jsonl(tmp_path / "rows.jsonl", [{"input": "q"}])
    words = f"--pretrain {tiny_model_dir} --prompt_data {data} --save_path {tmp_path / 'run'} "
    words += f"--policy_loss_type {file}:two --advantage_estimator {file}:three "
    words += f"--agent_func_path {file}:Game"
    code, said = refuse("train_ppo", words.split())
    *_, estimator, loss, game = said.splitlines()
    assert code == 2
    assert estimator.startswith(f"error: {file}:7: three(first, second, third) cannot be called")
    assert loss.startswith(f"error: {file}:4: two(first, second) cannot be called")
    assert game == (
        f"error: {file}:11: step(self, observation, action) cannot be called as it will be: "
        "missing a required argument: 'action'. Write step(self, states, **kwargs)."
    )


def test_a_users_error_shows_its_own_traceback(
    refuse: Callable, tiny_model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text("def loss(pairs, options):\n    return pairs.sums\n")
    row = {"input": "q", "chosen": "a", "rejected": "b"}
    data = write_jsonl(tmp_path / "rows.jsonl", [row])
    words = f"--pretrain {tiny_model_dir} --dataset {data} --save_path {tmp_path / 'run'} "
    words += f"--prompt_key input --loss_type {file}:loss"
    code, said = refuse("train_dpo", words.split())
    assert code == 2
    assert said.startswith(f'Traceback (most recent call last):\n  File "{file}", line 2, in loss')
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {file}:2: AttributeError: 'PairLogps' object has no attribute")


@pytest.mark.parametrize(
    "flags",
    ["--generate_max_len 100000", "--prompt_max_len 100000 --generate_max_len 8"],
)
def test_lengths_that_are_said_to_fit_the_model_do(
    tiny_model_dir: Path, tmp_path: Path, flags: str
) -> None:
    said = problem(tiny_model_dir, tmp_path, flags)
    assert "positions of the model" in said
    remedy = said.partition("Type ")[2].rstrip(".").partition(" or ")[0]
    assert "positions" not in problem(tiny_model_dir, tmp_path, f"{flags} {remedy}")


@pytest.mark.parametrize(("has_gpus", "stored", "flags", "expected"), [
    (True, "float32", "", torch.float32),
    (False, "bfloat16", "", torch.float32),
    (True, "float32", "--bf16", torch.bfloat16),
])  # fmt: skip
def test_the_engine_holds_the_type_of_the_trainer(
    tmp_path: Path, has_gpus: bool, stored: str, flags: str, expected: torch.dtype
) -> None:
    LlamaConfig(dtype=stored).save_pretrained(tmp_path)
    words = f"--pretrain {tmp_path} --prompt_data d --remote_rm_url r.py {flags}"
    config = parse_config(PPOConfig, words.split()).config
    assert policy_dtype(config, has_gpus=has_gpus) == expected
    assert engine_config(config, dtype=expected)["dtype"] == str(expected).removeprefix("torch.")


def test_train_ppo_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--pretrain m --prompt_data d --remote_rm_url r.py"
    config = parse_config(PPOConfig, words.split()).config
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="started as 2 processes, and trains in one"):
        run_ppo_local(config)
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = parse_config(PPOConfig, [*words.split(), "--async_train"]).config
    with pytest.raises(ConfigError, match="Use train_ppo_ray, or leave --async_train out"):
        run_ppo_local(config)


def test_every_engine_draws_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start_actor(kind: type, arguments: tuple, slot: object, **options: object) -> None:
        started.append(arguments[0]["seed"])

    monkeypatch.setattr(vllm_engine, "start_actor", start_actor)
    words = ["--pretrain", "m", "--prompt_data", "d", "--remote_rm_url", "r.py"]
    config = parse_config(PPOConfig, words).config
    slots: list[dict[str, Any]] = [{}] * 4
    for resume_step in range(3):
        settings = engine_config(config, dtype=torch.float32, resume_step=resume_step)
        create_vllm_engines(settings, slots, run_dir="run")
    assert len(set(started)) == 12


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


def experience_of(flags: str, rollouts: Sequence[Rollout], **groups: FakeGroup) -> Experience:
    """What the run's experience maker makes of samples; groups by role."""
    config, all_groups = config_of(flags), {"actor": FakeGroup(), **groups}
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
    experience_of(flags, rollouts, **groups)
    assert {role: len(group.asked) for role, group in groups.items()} == expected


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
        loss, _ = worker.compute_loss(experience.packed(), experience, step, Metrics())
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
    loss, _ = worker.compute_loss(experience.packed(), experience, step, Metrics())
    assert float(loss) == pytest.approx(expected)
