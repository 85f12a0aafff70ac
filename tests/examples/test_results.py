"""The scripts behind docs/results.md, with few steps."""

import os
from pathlib import Path

import pytest

from openrlhf.utils.tracker import read_metrics
from tests.integration.commands import run_command

RESULTS = Path(__file__).resolve().parents[2] / "examples" / "results"


@pytest.mark.parametrize(
    ("model", "script"),
    [(None, "examples/scripts/demo.sh"), ("smollm2", "examples/results/sums.sh")],
)
def test_the_demo_trains_the_tiny_model_or_the_real_one(model: str | None, script: str) -> None:
    words = ["make", "--dry-run", "--no-print-directory", "-C", RESULTS.parents[1], "demo"]
    said = run_command(*words, *([f"MODEL={model}"] if model else []))
    assert said.splitlines()[-1].endswith(f"bash {script}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_of_sums_trains_the_real_model(tmp_path: Path) -> None:
    env = os.environ | {"OUT": str(tmp_path), "STEPS": "1", "ARGS": "--eval_steps -1"}
    said = run_command("bash", RESULTS / "sums.sh", env=env, timeout=560)
    assert (
        "| question | right | before | after |\n|---|---|---|---|\n| What is 6 + 75? | 81 | `"
        in said
    )
    records = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    found = [r["eval/eval_default_pass1"] for r in records if "eval/eval_default_pass1" in r]
    assert len(found) == 2 and 0.05 < found[0] < 0.2
    assert (tmp_path / "rl" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_sums_with_trl_are_asked_alike_and_compared(tmp_path: Path) -> None:
    sizes = {"STEPS": "2", "SEEDS": "0", "EVERY": "1", "MICRO_BATCH": "16"}
    env = os.environ | sizes | {"OUT": str(tmp_path)}
    said = run_command("bash", RESULTS / "beside_trl.sh", env=env, timeout=850)
    ours, theirs, ratio = said.splitlines()[-3:]
    for row, name in ((ours, "openrlhf"), (theirs, "TRL")):
        trained_by, seed, reached, seconds, gib, rates = row.strip("| ").split(" | ")
        assert (trained_by, seed, reached) == (name, "0", "not reached")
        assert float(seconds) > 0 and 1 < float(gib) < 24
        assert all(0 <= float(rate) < 0.4 for rate in rates.split(", ")) and "," in rates
    assert ratio.startswith("TRL takes ")
    picture = tmp_path / "sums.png"
    run_command("python", RESULTS / "draw.py", tmp_path / "seed-0" / "rl", tmp_path, picture)
    assert picture.stat().st_size > 10_000
    run_command("python", RESULTS / "draw_runs.py", picture, f"sums={tmp_path}/seed-0/rl")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sft_and_dpo_with_trl_learn_from_the_same_rows_and_are_compared(tmp_path: Path) -> None:
    sizes = {"PROMPTS": "48", "SEEDS": "0", "SAMPLES": str(tmp_path / "none")}
    env = os.environ | sizes | {"OUT": str(tmp_path)}
    said = run_command("bash", RESULTS / "offline_trl.sh", env=env, timeout=1150)
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if line[:1] == "|"][-4:]
    assert [row[0] for row in rows] == ["`sft`", "sft, TRL", "`dpo`", "dpo, TRL"]
    for ours, theirs in (rows[:2], rows[2:]):  # the same loss of the same rows before an update
        first, second = (float(row[4].split(", ")[0]) for row in (ours, theirs))
        assert abs(first - second) < 0.05 * first


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_of_methods_trains_with_each_and_compares_them(tmp_path: Path) -> None:
    sizes = {"STEPS": "1", "SEEDS": "0", "METHODS": "reinforce dynamic"}
    env = os.environ | sizes | {"OUT": str(tmp_path)}
    said = run_command("bash", RESULTS / "methods.sh", env=env, timeout=800)
    *_, reinforce, dynamic = said.splitlines()
    for row, method in ((reinforce, "reinforce"), (dynamic, "dynamic")):
        name, rates, end, seeds, steps, seconds = row.strip("| ").split(" | ")
        assert name == method and rates.startswith("0.10 → ") and seeds == end.split()[0]
        assert steps == "1" and float(seconds) > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_script_of_the_offline_methods_trains_and_compares_them(tmp_path: Path) -> None:
    env = os.environ | {"OUT": str(tmp_path), "PROMPTS": "24", "TEACHER": str(tmp_path / "none")}
    said = run_command("bash", RESULTS / "offline.sh", env=env, timeout=1150)
    for name in ("sft", "dpo", "kto", "boxed"):
        assert (tmp_path / name / "model.safetensors").exists()
        assert f"/{name}" in said.rpartition("pass@1")[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_of_the_calculator_trains_an_agent_that_calls_it(tmp_path: Path) -> None:
    env = os.environ | {"OUT": str(tmp_path), "STEPS": "2", "ARGS": "--eval_steps -1"}
    said = run_command("bash", RESULTS / "calculator.sh", env=env, timeout=850)
    assert "| What is 6411 + 6990? | 13401 | `" in said and "result: " in said
    records = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    calls = [record["extra/calls"] for record in records if "extra/calls" in record]
    assert len(calls) == 2 and min(calls) > 0.2  # as half of the dialogues do


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_of_reasoning_gym_trains_the_real_model_on_its_tasks(tmp_path: Path) -> None:
    sizes = {"TASK": "gcd", "STEPS": "1", "ARGS": "--eval_steps -1"}
    env = os.environ | sizes | {"OUT": str(tmp_path)}
    said = run_command("bash", RESULTS / "gym.sh", env=env, timeout=850)
    assert "| Find the Greatest Common Divisor (GCD) of these numbers: " in said
    found = [r for r in read_metrics(tmp_path / "rl" / "metrics.jsonl") if "score" in r]
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_of_the_reward_model_trains_it_and_then_ppo_with_a_critic(
    tmp_path: Path,
) -> None:
    sizes = {"STEPS": "1", "PAIRS": "64"}
    env = os.environ | sizes | {"OUT": str(tmp_path)}
    said = run_command("bash", RESULTS / "reward_model.sh", env=env, timeout=850)
    *_, before, after = [line for line in said.splitlines() if "  default  " in line]
    assert before.startswith("models/smollm2-135m ") and after.startswith(f"{tmp_path}/rl ")
    [found] = [r for r in read_metrics(tmp_path / "rl" / "metrics.jsonl") if "reward" in r]
    assert {"critic_loss", "policy_loss"} <= found.keys()
