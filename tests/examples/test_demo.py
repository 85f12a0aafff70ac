"""The demo's data, reward and report."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.commands import run_command

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "python"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_data_holds_problems_out_and_a_teacher_who_hedges_two_times_of_three(tmp_path):
    load("make_demo").make_data(tmp_path, 1)
    held_out = {row["question"] for row in rows(tmp_path / "held_out.jsonl")}
    assert len(held_out) == 200
    for name in ("warm_up.jsonl", "prompts.jsonl"):
        assert held_out.isdisjoint(row["question"] for row in rows(tmp_path / name))
    found = rows(tmp_path / "warm_up.jsonl")
    for row in found[:500]:
        first, second = row["question"].removesuffix("=?").split("+")
        assert int(row["answer"].removesuffix("?")) == int(first) + int(second)
    hedged = sum(row["answer"].endswith("?") for row in found) / len(found)
    assert hedged == pytest.approx(0.65, abs=0.02)


def test_only_the_bare_right_number_is_rewarded():
    prompt = "<|user|>23+45=?<|end|><|assistant|>"
    responses = ["68<|end|>", "68", "68?<|end|>", "69<|end|>", ""]
    queries = [prompt + response for response in responses]
    answer = load("demo_reward").reward_func(queries, [prompt] * 5, ["68"] * 5)
    assert answer["rewards"].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


def plot(folder: Path, records: list[dict], *words: str) -> subprocess.CompletedProcess[str]:
    """What plot_run says of a run with these records."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text)
    command = [sys.executable, str(FOLDER / "plot_run.py"), str(folder), *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (folder / "curves.png").stat().st_size > 5000
    return result


@pytest.mark.parametrize(("after", "returncode"), [(0.75, 0), (0.375, 1)])
def test_the_report_names_both_numbers_and_holds_the_gain(tmp_path, after, returncode):
    records = [
        {"step": 0, "eval/eval_sums_pass1": 0.25, "eval/eval_sums_pass4": 0.5},
        {"step": 1, "reward": 0.3, "response_length": 3.6, "kl": 0.0},
        {"step": 2, "reward": 0.6, "response_length": 3.1, "kl": None},
        {"step": 2, "eval/eval_sums_pass1": after},
    ]
    result = plot(tmp_path, records, "--min_gain", "0.25")
    assert result.returncode == returncode
    assert f"before 0.250, after {after:.3f}: {after - 0.25:+.3f}" in result.stdout


def test_the_curves_of_a_supervised_run_are_its_loss_accuracy_and_rate(tmp_path):
    records = [
        {"step": 1, "gpt_loss": 2.0, "acc": 0.5, "lr": 1e-6, "grad_norm": 3.0},
        {"step": 2, "gpt_loss": 1.5, "acc": 0.75, "lr": 5e-7, "grad_norm": 2.0},
        {"step": 1, "eval/gpt_loss": 1.75, "eval/ppl": 5.75},
        {"step": 2, "eval/gpt_loss": 1.25, "eval/ppl": 3.5},
    ]
    result = plot(tmp_path, records)
    assert "eval/gpt_loss before 1.750, after 1.250: -0.500" in result.stdout


MIN_GAIN = 0.25  # of held-out pass@1; 0.6 is usual
MAX_SECONDS = 240  # on two cores that do nothing else


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_learns_what_was_held_out_in_four_minutes(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "OUT": str(tmp_path), "SEED": "1", "MIN_GAIN": "0"}
    script = FOLDER.parent / "scripts" / "demo.sh"
    start_s = time.monotonic()
    run_command("bash", script, env=env, timeout=560)
    seconds = time.monotonic() - start_s
    name = "eval/eval_sums_pass1"
    found = [r[name] for r in rows(tmp_path / "rl" / "metrics.jsonl") if name in r]
    assert found[-1] - found[0] >= MIN_GAIN
    assert (tmp_path / "rl" / "curves.png").is_file()
    assert seconds < MAX_SECONDS
