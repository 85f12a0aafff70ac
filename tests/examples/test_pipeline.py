"""SFT, reward model, PPO: each step of the pipeline script starts from what the last one wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIN_GAIN = 0.8  # in standard deviations of the reward model's scores; 1.7 was seen


def records(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pipeline_raises_the_reward_of_the_model_it_trained(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OUT": str(tmp_path / "run"), "SEED": "1"}
    script = ROOT / "examples" / "scripts" / "sft_rm_ppo.sh"
    result = subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=560)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    [*_, last] = [r for r in records(tmp_path / "run" / "rm") if "eval/acc" in r]
    assert last["eval/acc"] > 0.95
    rewards = [r["reward"] for r in records(tmp_path / "run" / "ppo") if "reward" in r]
    assert sum(rewards[-3:]) / 3 > rewards[0] + MIN_GAIN
