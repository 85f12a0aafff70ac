"""A reward that fails in the middle of a real run, with Ray and vLLM: one line, and nothing of the
run lives on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.integration.commands import argv

pytestmark = pytest.mark.slow

FLAGS = (
    "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "
    "--vllm_num_engines 1"
)
# Step 1 asks for the rewards of 8 prompts x 2 samples, step 2 for those of the other 3 prompts.
REWARD_CODE = """
from pathlib import Path

SEEN = Path(__file__).with_suffix(".seen")


def reward_func(queries, prompts, labels):
    with SEEN.open("a") as file:
        file.write("x" * len(queries))
    if len(SEEN.read_text()) > 16:
        raise ValueError("the grader is gone")
    return {"rewards": [float(len(query)) for query in queries]}
"""
FAILING_LINE = 11
TIMEOUT_S = 400.0
END_TIMEOUT_S = 15.0  # Ray's daemons notice the end of their driver


@dataclass(frozen=True)
class Outcome:
    """How the run ended."""

    code: int
    output: str
    errors: str
    titles: set[str]  # of all processes it ever had below it
    left: list[str]  # of those alive after it


def watch(process: subprocess.Popen[str]) -> dict[psutil.Process, str]:
    """Every process seen below one until it ended, with its last title: Ray gives its workers one
    when they have something to do.
    """
    top, seen = psutil.Process(process.pid), dict[psutil.Process, str]()
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None:
        assert time.monotonic() < deadline, "the run does not end"
        with suppress(psutil.NoSuchProcess):  # ended between two looks
            for child in top.children(recursive=True):
                seen[child] = " ".join(child.cmdline()) or seen.get(child, "")
        time.sleep(0.2)
    return seen


@pytest.fixture(scope="module")
def outcome(
    tiny_model_dir: Path, prompt_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    """A run on a local Ray of its own."""
    folder = tmp_path_factory.mktemp("failing")
    reward = folder / "reward_late.py"
    reward.write_text(REWARD_CODE)
    words = argv(
        FLAGS,
        pretrain=tiny_model_dir,
        prompt_data=prompt_file,
        remote_rm_url=reward,
        input_key="input",
        label_key="answer",
        save_path=folder / "run",
    )
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *words],
            stdout=out,
            stderr=err,
            text=True,
            env=os.environ | {"RAY_ADDRESS": "local"},
        )
        seen: dict[psutil.Process, str] = {}
        try:
            seen = watch(process)
        finally:
            process.kill()
            process.wait()
            _, alive = psutil.wait_procs(list(seen), timeout=END_TIMEOUT_S)
            for child in alive:
                child.kill()
    return Outcome(
        process.returncode,
        (folder / "out").read_text(),
        (folder / "err").read_text(),
        set(seen.values()),
        [seen[child] for child in alive],
    )


def test_the_first_step_was_done_and_the_second_ended_the_run(outcome: Outcome) -> None:
    assert "step 1/2 |" in outcome.output
    assert "step 2/2 |" not in outcome.output
    assert outcome.code == 3, outcome.errors[-3000:]


def test_the_failure_is_one_line_with_file_and_line(outcome: Outcome) -> None:
    errors = [line for line in outcome.errors.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, outcome.errors[-3000:]
    assert f"reward_late.py:{FAILING_LINE}: ValueError: the grader is gone" in errors[0]
    assert "Traceback" not in outcome.output + outcome.errors


def test_no_process_of_the_run_is_left(outcome: Outcome) -> None:
    titles = " ".join(outcome.titles)
    for part in ("raylet", "gcs_server", "LLMRayActor", "PolicyModelActor"):
        assert part in titles  # else nothing was watched
    assert outcome.left == []
