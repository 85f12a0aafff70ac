"""batch_inference under launchers: every rank does its share, with an engine of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.heads import free_ports
from tests.integration.test_launchers import environment
from tests.tiny import make_model, make_reward_model, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODULE = "openrlhf.cli.batch_inference"
LAUNCHERS = {
    "deepspeed": "deepspeed --num_gpus 2 --master_port {port} --module",
    "torchrun": "torchrun --nproc_per_node 2 --master_port {port} -m",
    "python": "python -m",
}
VLLM = "--eval_task generate_vllm --greedy_sampling --prompt_max_len 64 --max_num_seqs 4"
NUM_PROMPTS = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    make_model(folder / "model")
    make_reward_model(folder / "reward")
    prompts = [{"input": "ab" * (i % 5 + 1) + str(i)} for i in range(NUM_PROMPTS)]
    write_jsonl(folder / "prompts.jsonl", prompts)
    write_jsonl(folder / "answers.jsonl", [{**row, "output": "xyz"} for row in prompts])
    return folder


def command(launcher: str, flags: str) -> list[str]:
    """A command of the Python that runs the tests."""
    [port] = free_ports(1)
    name, *words = LAUNCHERS[launcher].format(port=port).split()
    return [str(Path(sys.executable).parent / name), *words, MODULE, *flags.split()]


def run(launcher: str, flags: str) -> str:
    done = subprocess.run(
        command(launcher, flags), env=environment(), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def generate(folder: Path, out: str, prompts: str, num_tokens: int) -> str:
    return (
        f"{VLLM} --pretrain {folder}/model --dataset {folder}/{prompts} "
        f"--output_path {folder}/{out} --max_new_tokens {num_tokens}"
    )


def test_two_engines_answer_as_one(folder: Path) -> None:
    run("python", generate(folder, "one.jsonl", "prompts.jsonl", 12))
    stdout = run("torchrun", generate(folder, "two.jsonl", "prompts.jsonl", 12))
    assert stdout.count(f"{NUM_PROMPTS} rows written") == 1
    assert (folder / "two.jsonl").read_text() == (folder / "one.jsonl").read_text()
    assert not (folder / "two.jsonl.parts").exists()


def kill_in_the_middle(words: list[str], parts: Path) -> int:
    """Start, wait until both ranks left results, kill -9 all of them; answers how many there
    were.
    """
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL)
    files = [parts / f"rank{rank}.jsonl" for rank in range(2)]
    deadline = time.monotonic() + 240
    try:
        while not all(path.exists() for path in files):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
    finally:
        for each in (process, *psutil.Process(process.pid).children(recursive=True)):
            each.send_signal(signal.SIGKILL)
        process.wait()
    return sum(len(path.read_text().splitlines()) for path in files)


def test_killed_engines_go_on_where_they_stopped(folder: Path) -> None:
    write_jsonl(folder / "many.jsonl", [{"input": f"prompt {i}"} for i in range(160)])
    flags = generate(folder, "killed.jsonl", "many.jsonl", 64)
    num_done = kill_in_the_middle(command("torchrun", flags), folder / "killed.jsonl.parts")
    assert 0 < num_done < 160
    assert not (folder / "killed.jsonl").exists()
    assert "going on with what is done" in run("torchrun", flags)
    run("python", generate(folder, "straight.jsonl", "many.jsonl", 64))
    assert (folder / "killed.jsonl").read_text() == (folder / "straight.jsonl").read_text()


def test_two_ranks_of_deepspeed_score_as_one(folder: Path) -> None:
    for launcher in ("python", "deepspeed"):
        run(
            launcher,
            f"--eval_task rm --pretrain {folder}/reward --dataset {folder}/answers.jsonl "
            f"--output_path {folder}/{launcher}.jsonl --micro_batch_size 2",
        )
    alone, together = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("python", "deepspeed")
    )
    assert [row["input"] for row in together] == [row["input"] for row in alone]
    rewards = [row["reward"] for row in alone]
    assert [row["reward"] for row in together] == pytest.approx(rewards, abs=1e-5)
