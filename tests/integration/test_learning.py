"""The documents' commands learn: real Ray, vLLM and DeepSpeed, rewards of every kind, fixed seeds.

A random byte model is rewarded for the letters that its row's answer names. They are a tenth of its
vocabulary; within a minute or two they are most of what it writes.
"""

from pathlib import Path
from statistics import fmean

import pytest

from openrlhf.cli import train_ppo_ray
from tests.integration.commands import PPO_HYBRID, argv, steps_of
from tests.tiny import make_model, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_STEPS = 24
MIN_GAIN = 0.3  # in the share of wanted letters, from about 0.1
RATES = (
    "--seed 7 --actor_learning_rate 3e-3 --critic_learning_rate 3e-3 --lr_scheduler constant "
    "--lr_warmup_ratio 0"
)
SIZES = (
    "--rollout_batch_size 16 --micro_rollout_batch_size 32 --n_samples_per_prompt 8 "
    "--train_batch_size 128 --micro_train_batch_size 128 --prompt_max_len 32 "
    f"--generate_max_len 12 --num_episodes {NUM_STEPS} {RATES}"
)
DOCUMENTS_STEPS = 6  # of 8 updates each
DOCUMENTS_SIZES = (
    "--micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 "
    "--rollout_batch_size 1024 --n_samples_per_prompt 1 --max_epochs 1 --prompt_max_len 1024 "
    f"--generate_max_len 12 --num_episodes {DOCUMENTS_STEPS} {RATES}"
)
# As in the documents, with a reward in the place of the tossed one.
REWARD_FUNC = """
import torch


def reward_func(queries, prompts, labels):
    # queries is prompts + responses
    # labels is answers
    print(queries)
    responses = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    shares = [
        sum(letter in label for letter in response) / max(len(response), 12)
        for response, label in zip(responses, labels)
    ]
    reward = torch.tensor(shares)
    return {
        "rewards": reward,  # Rewards for advantage calculation
        "scores": reward,  # Scores for dynamic filtering (0-1 reward)
        "extra_logs": {"dummy_scores": reward},  # Additional logging info for wandb
    }
"""


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Path | str]:
    """A model, sixteen prompts and the sizes of a run."""
    rows = [{"input": f"write {k}: ", "answer": LETTERS} for k in range(16)]
    return {
        "pretrain": make_model(tmp_path / "model", seed=5),
        "prompt_data": write_jsonl(tmp_path / "prompts.jsonl", rows),
        "input_key": "input",
        "save_path": tmp_path / "run",
    }


def train(flags: str, *, sizes: str = SIZES, **values: Path | str) -> list[dict[str, float]]:
    """Run the command; the records of its steps."""
    train_ppo_ray.main([*argv(flags, **values), *sizes.split()])
    return steps_of(Path(values["save_path"]))


def test_ppo_learns_from_a_reward_function(ray_cluster: None, values: dict, tmp_path: Path) -> None:
    """The command as it stands in the documents, with its batches; only devices, learning rates and
    the length of responses are those of a small machine.
    """
    (tmp_path / "reward_func.py").write_text(REWARD_FUNC)
    messages = [[{"role": "user", "content": f"write {k}"}] for k in range(1024)]
    rows = [{"context_messages": turns, "answer": LETTERS} for turns in messages]
    steps = train(
        f"{PPO_HYBRID} --ckpt_path {tmp_path / 'ckpt'}",
        sizes=DOCUMENTS_SIZES,
        remote_rm_url=tmp_path / "reward_func.py",
        label_key="answer",
        pretrain=values["pretrain"],
        prompt_data=write_jsonl(tmp_path / "messages.jsonl", rows),
        save_path=values["save_path"],
    )
    assert len(steps) == DOCUMENTS_STEPS
    assert steps[0]["reward"] < 0.2
    assert steps[-1]["reward"] - steps[0]["reward"] > MIN_GAIN


def test_an_asynchronous_run_learns(ray_cluster: None, values: dict, tmp_path: Path) -> None:
    (tmp_path / "reward_func.py").write_text(REWARD_FUNC)
    steps = train(
        "--async_train --enable_vllm_is_correction --vllm_num_engines 1 --enforce_eager "
        "--advantage_estimator reinforce_baseline --init_kl_coef 0 --partial_rollout",
        remote_rm_url=tmp_path / "reward_func.py",
        label_key="answer",
        **values,
    )
    assert len(steps) == NUM_STEPS
    assert steps[0]["reward"] < 0.2
    assert fmean(step["reward"] for step in steps[-3:]) - steps[0]["reward"] > MIN_GAIN
