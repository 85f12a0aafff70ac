"""The demo's data and reward, and what it learns."""

import importlib.util
import os
import resource
from pathlib import Path

import pytest

from tests.integration.commands import run_command
from tests.tiny import read_jsonl

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "python"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_data_holds_problems_out_and_a_teacher_who_hedges_two_times_of_three(tmp_path):
    load("make_demo").make_data(tmp_path, 1)
    held_out = {row["question"] for row in read_jsonl(tmp_path / "held_out.jsonl")}
    assert len(held_out) == 200
    for name in ("warm_up.jsonl", "prompts.jsonl"):
        assert held_out.isdisjoint(row["question"] for row in read_jsonl(tmp_path / name))
    found = read_jsonl(tmp_path / "warm_up.jsonl")
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


MIN_GAIN = 0.25  # of held-out pass@1; 0.6 is usual
MAX_CPU_SECONDS = 480  # four minutes on two cores, whatever else they do meanwhile


MAX_CPU_SECONDS_OF_VISION = 240  # two minutes


def cpu_seconds_of(script: Path, env: dict[str, str]) -> float:
    """Run a script; return the processor time that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_command("bash", script, env=os.environ | env, timeout=560)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_learns_what_was_held_out_in_four_minutes(tmp_path: Path) -> None:
    script = FOLDER.parent / "scripts" / "demo.sh"
    cpu_seconds = cpu_seconds_of(script, {"OUT": str(tmp_path), "SEED": "1"})
    name = "eval/eval_sums_pass1"
    found = [r[name] for r in read_jsonl(tmp_path / "rl" / "metrics.jsonl") if name in r]
    assert found[-1] - found[0] >= MIN_GAIN
    assert {"curves.png", "report.html"} <= set(os.listdir(tmp_path / "rl"))
    assert cpu_seconds < MAX_CPU_SECONDS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_with_pictures_learns_to_name_them_and_a_blind_model_does_not(
    tmp_path: Path,
) -> None:
    script = FOLDER.parent / "scripts" / "demo_vision.sh"
    cpu_seconds = cpu_seconds_of(script, {"OUT": str(tmp_path)})
    name, found = "eval/eval_default_pass1", {}
    for run in ("rl", "blind"):
        records = read_jsonl(tmp_path / run / "metrics.jsonl")
        found[run] = [record[name] for record in records if name in record]
    assert found["rl"][-1] >= found["rl"][0] + 0.1
    assert found["rl"][-1] > 0.85
    assert max(found["blind"]) < 0.35  # it can tell colours from digits, which it is asked for
    assert "data:image/png;base64," in (tmp_path / "report.html").read_text()
    assert cpu_seconds < MAX_CPU_SECONDS_OF_VISION
