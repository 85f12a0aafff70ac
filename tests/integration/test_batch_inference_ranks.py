"""batch_inference under launchers: every rank does its share, with an engine of its own."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.commands import run_command
from tests.integration.heads import free_ports
from tests.integration.test_launchers import environment
from tests.tiny import make_model, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TWO = "torchrun --nproc_per_node 2 --master_port {port} -m openrlhf.cli.batch_inference"
VLLM = "--eval_task generate_vllm --greedy_sampling --prompt_max_len 64 --max_num_seqs 4"
NUM_PROMPTS = 160


def command(launcher: str, flags: str) -> list[str]:
    """A command of the Python that runs the tests."""
    [port] = free_ports(1)
    name, *words = launcher.format(port=port).split()
    return [str(Path(sys.executable).parent / name), *words, *flags.split()]


def kill_in_the_middle(words: list[str], parts: Path) -> int:
    """Start, wait until both ranks left results, kill -9 all of them; answers how many there
    were.
    """
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    try:
        while len(files := [p for p in parts.glob("*/rank*.jsonl") if p.stat().st_size]) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
    finally:
        for each in (process, *psutil.Process(process.pid).children(recursive=True)):
            each.send_signal(signal.SIGKILL)
        process.wait()
    return sum(len(path.read_text().splitlines()) - 1 for path in files)


def test_killed_engines_go_on_where_they_stopped_and_two_answer_as_one(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    prompts = [{"input": f"prompt {i}"} for i in range(NUM_PROMPTS)]
    rows = write_jsonl(tmp_path / "many.jsonl", prompts)
    killed, straight = tmp_path / "killed.jsonl", tmp_path / "straight.jsonl"
    flags = f"{VLLM} --pretrain {tmp_path}/model --dataset {rows} --max_new_tokens 64 --output_path"
    parts = tmp_path / "killed.jsonl.parts"
    num_done = kill_in_the_middle(command(TWO, f"{flags} {killed}"), parts)
    assert 0 < num_done < NUM_PROMPTS and not killed.exists()
    with next(parts.glob("*/rank0.jsonl")).open("a") as file:
        file.write('\n[17, [{"input": "half a li')
    said = run_command(*command(TWO, f"{flags} {killed}"), env=environment())
    assert "going on with what is done" in said and said.count("160 rows written") == 1
    one = ["-m", "openrlhf.cli.batch_inference", *flags.split(), straight]
    run_command(*one, env=environment())
    assert killed.read_text() == straight.read_text() and not parts.exists()
