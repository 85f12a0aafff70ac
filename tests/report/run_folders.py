"""Run folders written by hand: what a run of reinforcement learning leaves, old and new."""

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from openrlhf.utils.rollout_files import write_rollouts

ATTACK = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
# Searches among the samples of a run of three steps, and the rewards of what they find.
SEARCHES = {
    "reward=1 length>=3": ["1"] * 3,
    "it is REWARD > 0.25 3 length<3.5": ["1", "1.25"],
    "reward>2 reward<1e9": ["2.25"] * 3,
    "advantage=.5 score<=0": ["0.25"] * 2,
    "advantage<1 reward=1": ["1"] * 2,  # the second step has no advantages
    "xreward=1": [],
}


def make_run(path: Path, *, num_steps: int = 3, learning_rate: float = 1e-5, seed: int = 0) -> Path:
    """A run of `num_steps` steps of 3 prompts with 2 samples each, evaluated before and after."""
    records = [evaluation(0, 0.25)]
    records += [training_record(step, seed) for step in range(1, num_steps + 1)]
    records.append(evaluation(num_steps, 0.5))
    write_metrics(path, records)
    config = {"actor": {"model_name_or_path": "tiny", "adam": {"lr": learning_rate}}, "seed": 1}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    for step in range(1, num_steps + 1):
        rows = [sample(step, group, number) for group in range(3) for number in range(2)]
        write_rollouts(path, step, rows, num_kept=1000)
    return path


def write_metrics(path: Path, records: Sequence[dict]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def evaluation(step: int, pass1: float) -> dict:
    values = {"eval/eval_sums_pass1": pass1, "eval/eval_sums_pass1_stderr": 0.125}
    return {"step": step, "time": 100.0 + step, **values}


def training_record(step: int, seed: int) -> dict:
    """Rewards that all are equal in step 2; a KL that is not finite in step 3."""
    return {
        "step": step,
        "time": 100.0 + step,
        "reward": 0.25 * step + seed,
        "reward/format": 0.125,
        "group_reward_std": 0.0 if step == 2 else 0.5,
        "kl": None if step == 3 else 0.01,
        "policy_loss": 0.5,
        "memory/actor_gib": 1.5,
        "timing/generation": 2.0,
        "timing/ppo_train": 1.0,
        "timing/save": 0.25,
        "timing/step_total": 3.5,
        "extra/num_lines": 4.0,
    }


def sample(step: int, group: int, number: int) -> dict:
    """A prompt of two tokens and a response of three, of which a tool wrote the second; in step 2
    as older versions wrote it.
    """
    row = {
        "sample_id": f"{step}-{group}-{number}",
        "row": 10 + group,
        "prompt": f"{group}+{step}=",
        "response": ATTACK if group == 2 else f"it is {group + step}",
        "label": str(9 + group),
        "reward": group + 0.25 * number,
        "score": float(group),
        "finish_reason": "stop",
        "num_actions": 2 + group,
        "weight_version": step - 1,
    }
    if step == 2:
        return row
    return row | {
        "group_id": group,
        "datasource": "sums",
        "reward_parts": json.dumps({"format": 0.125, "answer": float(group)}),
        "advantage": number - 0.5,
        "colour": "blue",
        "token_ids": [5, 6, 7, 8, 9],
        "token_texts": [f"{group}+", f"{step}=", ATTACK if group == 2 else "it", "\n", "is"],
        "action_mask": [False, False, True, False, True],
        "logprobs": [-1.0, -2.0],
        "old_logprobs": [-1.5, -2.0],
        "new_logprobs": [-1.0, -2.0],
        "advantages": [number - 0.5, 2.0],
        "weight_versions": [step - 1, step],
    }
