"""Ctrl-C and SIGTERM in the middle of a run: it saves, exits with code 130, says how to go on, and
leaves no process behind.
"""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers.processes import (
    SFT_FLAGS,
    environment,
    launched,
    saved_step,
    started,
    wait_for_a_step,
    workers,
)
from tests.integration.commands import argv, steps_of
from tests.tiny import write_jsonl

FLAGS = (
    "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "
    "--num_episodes {episodes} --logging_steps 1 "
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def interrupt(
    process: subprocess.Popen[str], number: int, send: Callable[[int, int], None] = os.kill
) -> str:
    """Send a signal; what the command said until it ended, with all its processes."""
    family = psutil.Process(process.pid).children(recursive=True)
    send(process.pid, number)
    _, error = process.communicate(timeout=90)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, alive
    return error


def test_ctrl_c_while_data_are_tokenised_is_one_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = [{"input": f"{n}?", "output": "yes " * 40} for n in range(60_000)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = f"--pretrain {tiny_model_dir} --dataset {data} --output_key output --save_path run"
    env = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    words = [sys.executable, "-m", "openrlhf.cli.train_sft", *flags.split(), *SFT_FLAGS.split()]
    with started(words, cwd=tmp_path, env=env, start_new_session=True) as process:
        while len(psutil.Process(process.pid).children()) < 3:  # two that tokenise, one that counts
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(1)
        error = interrupt(process, signal.SIGINT, os.killpg)
    last = "error: interrupted: nothing was saved yet. Type the same command to start again"
    assert error.splitlines()[-1:] == [last] and "Traceback" not in error, error
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("command", "number", "send"),
    [
        ("train_ppo --vllm_num_engines 0", signal.SIGINT, os.kill),
        # As timeout and scancel do: Ray's own processes must outlive it.
        ("train_ppo_ray --vllm_num_engines 1", signal.SIGTERM, os.killpg),
    ],
)
def test_an_interrupted_run_saves_ends_all_its_processes_and_goes_on(
    command: str,
    number: int,
    send: Callable[[int, int], None],
    given: dict,
    tmp_path: Path,
) -> None:
    module, *flags = command.split()
    run, root = tmp_path / "run", tmp_path / "ckpt"

    def words(episodes: int) -> list[str]:
        text = FLAGS.format(episodes=episodes) + " ".join(flags)
        return argv(text, **given, train_batch_size="16", ckpt_path=root)

    python = [sys.executable, "-m", f"openrlhf.cli.{module}"]
    with started([*python, *words(2000)], start_new_session=True) as process:
        wait_for_a_step(run, process)
        error = interrupt(process, number, send)
    assert process.returncode == 130, error[-3000:]
    step = saved_step(error, root)
    state = json.loads((root / f"global_step{step}" / "state.json").read_text())["run"]
    cursor, ledger = state["sampler"]["cursor"], state["sampler"]["ledger"]
    num_drawn = cursor["episode"] * 11 + cursor["position"]
    assert num_drawn == ledger["num_drawn"] == ledger["outcomes"]["trained"]
    assert not ledger["pending"]  # prompts of a step that was left are drawn again
    subprocess.run(
        [*python, *words(cursor["episode"] + 1), "--load_checkpoint"], check=True, timeout=200
    )
    steps = [record["step"] for record in steps_of(run)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= step


def test_ctrl_c_while_an_engine_starts_saves_without_waiting_for_it(
    given: dict, tmp_path: Path
) -> None:
    flags = FLAGS.format(episodes=2000) + "--vllm_num_engines 1 --colocate_all_models"
    words = argv(flags, **given, train_batch_size="16", ckpt_path=tmp_path / "ckpt")
    with started([sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *words]) as process:
        wait_for_a_step(tmp_path / "run", process)
        [engine] = workers("LLMRayActor", of=process.pid)
        engine.kill()
        time.sleep(3)  # another one imports vLLM, and holds the turn of the devices
        asked_at = time.monotonic()
        error = interrupt(process, signal.SIGINT)
    assert process.returncode == 130 and "a new one starts in its place" in error, error[-3000:]
    assert "is up again" not in error and time.monotonic() - asked_at < 30
    saved_step(error, tmp_path / "ckpt")


def test_ctrl_c_while_the_reference_starts_again_saves_without_waiting_for_it(
    given: dict, tmp_path: Path
) -> None:
    flags = FLAGS.format(episodes=2000) + "--vllm_num_engines 1"
    flags = flags.replace("--init_kl_coef 0 ", "--init_kl_coef 0.01 ")
    words = argv(flags, **given, train_batch_size="16", ckpt_path=tmp_path / "ckpt")
    with started([sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *words]) as process:
        wait_for_a_step(tmp_path / "run", process)
        [reference] = workers("ReferenceModelActor", of=process.pid)
        reference.kill()
        time.sleep(3)  # another one starts, and takes twice as long
        asked_at = time.monotonic()
        error = interrupt(process, signal.SIGINT)
    assert process.returncode == 130 and "ref is started again" in error, error[-3000:]
    assert time.monotonic() - asked_at < 30
    saved_step(error, tmp_path / "ckpt")


def test_a_run_whose_terminal_is_closed_saves_first(given: dict, tmp_path: Path) -> None:
    flags = FLAGS.format(episodes=99) + "--vllm_num_engines 0 --max_samples 4"
    words = argv(flags, **given, ckpt_path=tmp_path / "ckpt")
    words = [sys.executable, "-m", "openrlhf.cli.train_ppo", *words]
    own, other = pty.openpty()
    said, ends = "", {"stdin": other, "stdout": other, "stderr": other}

    def take_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        fcntl.ioctl(other, termios.TIOCSCTTY, 0)

    own_session = {"start_new_session": True, "preexec_fn": take_terminal}
    with subprocess.Popen(words, **ends, **own_session) as process:
        os.close(other)
        while "step 2/" not in said:
            said += os.read(own, 4096).decode(errors="replace")
        os.close(own)
        process.wait(90)
    assert process.returncode == 130
    log = (tmp_path / "run" / "logs" / "driver.log").read_text()
    assert "SIGHUP: saving once the step is over" in log
    assert len(list((tmp_path / "ckpt").glob("global_step*"))) == 1


def test_sigterm_while_the_policy_itself_generates_ends_with_code_130(
    given: dict, tmp_path: Path
) -> None:
    # A step is quick, the evaluation behind the second one is not: it is the end of its first.
    flags = (
        "--vllm_num_engines 0 --generate_max_len 900 --prompt_max_len 64 --n_samples_per_prompt 8"
    )
    words = argv(FLAGS.format(episodes=9) + "--save_steps 1", **given, ckpt_path=tmp_path / "ckpt")
    words = [sys.executable, "-m", "openrlhf.cli.train_ppo", *words, *flags.split()]
    with started([*words, "--train_batch_size", "64"]) as process:
        wait_for_a_step(tmp_path / "run", process)
        time.sleep(2)  # the next one generates
        error = interrupt(process, signal.SIGTERM)
    assert process.returncode == 130 and "terminate called" not in error, error[-3000:]
    saved_step(error, tmp_path / "ckpt")


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun --nproc_per_node 2 --master_port {port} -m {module}",
        "deepspeed --num_gpus 2 --master_port {port} --module {module}",
    ],
)
def test_supervised_training_saves_when_it_is_told_to_end(
    launcher: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i} and", "completion": "two words"} for i in range(80_000)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    run, root = tmp_path / "run", tmp_path / "ckpt"
    named = f"--pretrain {tiny_model_dir} --dataset {tmp_path}/rows.jsonl --ckpt_path {root}"
    words = [*launched("train_sft", launcher), *f"{named} --save_path {run} {SFT_FLAGS}".split()]
    with started(words, env=environment(), start_new_session=True) as process:
        wait_for_a_step(run, process, metric="gpt_loss")
        # deepspeed does not pass SIGTERM on
        send = os.killpg if "deepspeed" in launcher else os.kill
        error = interrupt(process, signal.SIGTERM, send)
    step = saved_step(error, root)
    state = json.loads((root / f"global_step{step}" / "state.json").read_text())["run"]
    assert state["place"] == f"step {step}, epoch 1, {8 * step} samples into it"
