"""Runs with dynamic sampling: full steps of groups with a signal, whatever generates and scores."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pandas

from openrlhf.cli import train_ppo
from openrlhf.utils.tracking import read_metrics
from tests.integration.commands import argv

FLAGS = (
    "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 --num_episodes 3 "
    "--dynamic_filtering --dynamic_filtering_reward_range -100 100 "
)
# About half of the pairs have two equal rewards.
PARITY = """
def reward_func(queries, prompts, labels):
    firsts = [query[len(prompt):][:1] or "a" for query, prompt in zip(queries, prompts)]
    return {"rewards": [float(ord(first) % 2) for first in firsts]}
"""


def test_steps_are_full_of_groups_with_a_signal(
    tiny_model_dir: Path, prompt_file: Path, tmp_path: Path
) -> None:
    code = tmp_path / "parity.py"
    code.write_text(PARITY)
    train_ppo.main(
        argv(
            FLAGS,
            pretrain=tiny_model_dir,
            prompt_data=prompt_file,
            remote_rm_url=code,
            rollout_batch_size="4",
            save_path=tmp_path / "run",
        )
    )
    steps = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in r]
    assert all(step["vllm_kl"] < 1e-3 and step["timing/generation"] > 0 for step in steps)
    tables = [pandas.read_parquet(p) for p in sorted((tmp_path / "run" / "rollouts").iterdir())]
    assert [len(table) for table in tables[:-1]] == [8] * (len(steps) - 1)  # all full but the last
    num_trained = sum(len(table) for table in tables)
    assert num_trained % 2 == 0 and 0 < num_trained < 66
    for table in tables:
        pairs = list(pairwise(table["sample_id"]))[::2]
        assert all(a[:-2] == b[:-2] for a, b in pairs) and table["sample_id"].is_unique
        assert table.groupby(table["sample_id"].str[:-2])["reward"].nunique().min() == 2
