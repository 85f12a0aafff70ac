"""RL commands in this process, on the Hugging Face engine: started, stopped, typed again."""

import json
from pathlib import Path

from openrlhf.cli import train_ppo
from tests.integration.commands import exit_code
from tests.tiny import make_model, make_reward_model, write_jsonl

# Scores that differ from sample to sample, and that a policy can raise.
# A run that is to be killed in the middle waits at every call, or it may end first.
REWARD_CODE = """
import os, time

def reward_func(queries, prompts, labels):
    time.sleep(float(os.environ.get("REWARD_DELAY", 0)))
    responses = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    scores = [sum(c in "abcdefghijklm" for c in text) / 8 for text in responses]
    return {"rewards": scores, "scores": scores}
"""
SIZES = (
    "--micro_train_batch_size 4 --train_batch_size 8 --micro_rollout_batch_size 4 "
    "--rollout_batch_size 4 --prompt_max_len 64 --generate_max_len 8 "
    "--actor_learning_rate 3e-3 --critic_learning_rate 1e-3 --lr_warmup_ratio 0"
)
GRPO = f"{SIZES} --advantage_estimator group_norm --n_samples_per_prompt 4"
PPO = f"{SIZES} --advantage_estimator gae --n_samples_per_prompt 2"
NUM_PROMPTS = 11  # batches of 4, 4 and 3 an episode


def make_inputs(root: Path) -> Path:
    """A model, prompts of two sources, text and a reward function."""
    make_model(root / "model")
    make_reward_model(root / "reward_model")
    prompts = [
        {"input": f"{i}+{i}=", "answer": str(2 * i), "datasource": ("even", "odd")[i % 2]}
        for i in range(NUM_PROMPTS)
    ]
    write_jsonl(root / "prompts.jsonl", prompts)
    texts = [{"text": "the quick brown fox jumps over it " * (1 + i % 3)} for i in range(7)]
    write_jsonl(root / "texts.jsonl", texts)
    (root / "reward.py").write_text(REWARD_CODE)
    return root


def words(root: Path, run_dir: Path, flags: str, *more: str) -> list[str]:
    """The words of a command; paths may hold spaces."""
    paths = {
        "pretrain": root / "model",
        "prompt_data": root / "prompts.jsonl",
        "label_key": "answer",
        "remote_rm_url": root / "reward.py",
        "save_path": run_dir,
        "ckpt_path": run_dir / "ckpt",
    }
    named = [word for name, value in paths.items() for word in (f"--{name}", str(value))]
    return [*named, *flags.format(root=root).split(), *more]


def start(root: Path, run_dir: Path, flags: str, *more: str) -> int:
    """One start of a command; its exit code."""
    return exit_code(train_ppo.main, words(root, run_dir, flags, *more))


def saved_run(folder: Path) -> dict:
    """What the controller noted in a checkpoint, without the metrics of its steps."""
    run = json.loads((folder / "state.json").read_text())["run"]
    return {name: value for name, value in run.items() if name != "history"}
