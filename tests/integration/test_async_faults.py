"""Asynchronous runs on real Ray, vLLM and DeepSpeed with something wrong on one side: named, or
gone on with, and no sample lost, done twice or too old.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from openrlhf.rollout import rollout_queue
from openrlhf.trainer.ppo_trainer_async import PPOTrainerAsync
from openrlhf.trainer.ppo_utils.model_scorer import ModelScorer
from tests.integration.heads import free_ports
from tests.integration.test_async_training import (  # noqa: F401 - trainers is a fixture
    FLAGS,
    histogram,
    run,
    trained_rows,
    trainers,
)

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(300)]

Trainers = list[PPOTrainerAsync]


@pytest.fixture
def given(tiny_model_dir: Path, prompt_file: Path, reward_file: Path, tmp_path: Path) -> dict:
    """The paths of a command."""
    return {
        "pretrain": tiny_model_dir,
        "prompt_data": prompt_file,
        "remote_rm_url": reward_file,
        "save_path": tmp_path / "run",
        "ckpt_path": tmp_path / "ckpt",
    }


@contextmanager
def at_step(step: int, act: Callable[[], None]) -> Iterator[None]:
    """A block in which something is done once, when a step is trained on."""
    settle = PPOTrainerAsync.settle

    def settle_and_act(trainer: PPOTrainerAsync) -> None:
        settle(trainer)
        if trainer.state.global_step == step:
            act()

    PPOTrainerAsync.settle = settle_and_act  # type: ignore[method-assign]
    try:
        yield
    finally:
        PPOTrainerAsync.settle = settle  # type: ignore[method-assign]


def kill(title: str) -> None:
    """End the Ray worker of a class as the kernel would."""
    [process] = workers(title)
    process.send_signal(signal.SIGKILL)


def workers(title: str) -> list[psutil.Process]:
    """The living Ray workers of a class."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # ended meanwhile
            if " ".join(process.cmdline()).startswith(f"ray::{title}"):
                found.append(process)
    return found


def check_balanced(trainer: PPOTrainerAsync, run_dir: Path, *, num_drawn: int) -> None:
    """Every prompt has one outcome, and what counts as trained on was."""
    ledger = trainer.sampler.ledger
    assert ledger.num_drawn == num_drawn == sum(ledger.outcomes.values()) and not ledger.pending
    assert len(trained_rows(run_dir)) == 2 * ledger.outcomes["trained"]


@pytest.mark.parametrize(
    ("title", "who"), [("LLMRayActor", "vllm-0"), ("PolicyModelActor", "actor rank 0 of 1")]
)
def test_a_killed_process_is_named_and_the_same_command_goes_on(
    ray_cluster: None,
    given: dict,
    trainers: Trainers,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    title: str,
    who: str,
) -> None:
    flags = FLAGS + "--num_episodes 2 --save_steps 2 --partial_rollout --async_queue_size 2"
    struck_at: list[float] = []

    def strike() -> None:
        kill(title)
        struck_at.append(time.monotonic())

    with at_step(3, strike), pytest.raises(SystemExit) as stopped:
        run(flags, **given)
    assert time.monotonic() - struck_at[0] < 30
    said = capsys.readouterr().err
    assert stopped.value.code == 3 and f"error: {who}" in said and "died" in said, said
    steps = run(f"{flags} --load_checkpoint", **given)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert max(histogram(steps)) <= 2
    check_balanced(trainers[-1], given["save_path"], num_drawn=22)


FAILING = """
def reward_func(queries, prompts, labels):
    if "10" in labels:
        raise ValueError("no answer for five and five")
    return {"rewards": [float(len(query)) for query in queries]}
"""


def test_prompts_whose_reward_fails_are_counted_or_end_the_run(
    ray_cluster: None,
    given: dict,
    trainers: Trainers,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    given["remote_rm_url"] = tmp_path / "failing.py"
    given["remote_rm_url"].write_text(FAILING)
    steps = run(
        FLAGS + "--reward_failure drop_group --reward_max_dropped 0.5 --num_episodes 2", **given
    )
    assert trainers[0].sampler.ledger.outcomes == {"trained": 20, "failed:reward": 2}
    assert sum(step.get("num_dropped_groups", 0) for step in steps) > 0
    assert max(histogram(steps)) <= 1
    check_balanced(trainers[0], given["save_path"], num_drawn=22)
    assert "no answer for five and five" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        run(FLAGS + "--num_episodes 2", **given)
    assert stopped.value.code == 3
    assert "no answer for five and five" in capsys.readouterr().err


SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"rewards": [float(len(query)) for query in body["query"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_reward_server_may_die_and_come_back(
    ray_cluster: None,
    given: dict,
    trainers: Trainers,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_queue, "STALL_S", 2.0)
    [port] = free_ports(1)
    command = [sys.executable, "-c", SERVER, str(port)]
    servers = [subprocess.Popen(command)]

    def die() -> None:
        servers[0].kill()
        servers[0].wait()
        back = f"import os, sys, time; time.sleep(8); os.execv(sys.executable, {command!r})"
        servers.append(subprocess.Popen([sys.executable, "-c", back]))

    given["remote_rm_url"] = f"http://127.0.0.1:{port}/get_reward"
    try:
        with at_step(2, die):
            steps = run(FLAGS + "--num_episodes 2 --reward_failure retry(6)", **given)
    finally:
        for server in servers:
            server.kill()
            server.wait()
    assert trainers[0].sampler.ledger.outcomes == {"trained": 22}
    assert max(histogram(steps)) <= 1
    check_balanced(trainers[0], given["save_path"], num_drawn=22)
    said = capsys.readouterr().out
    stalled = r"waited \d+ s for (samples|running samples to finish): .*wait for their rewards"
    assert re.search(stalled, said), said


SLOW_REWARD = """
import time

def reward_func(queries, prompts, labels):
    time.sleep({seconds})
    return {{"rewards": [float(len(query)) for query in queries]}}
"""


@pytest.mark.parametrize("is_trainer_slow", [False, True])
@pytest.mark.parametrize("flags", ["", "--partial_rollout --async_queue_size 3"])
def test_either_side_may_be_slower(
    ray_cluster: None,
    given: dict,
    trainers: Trainers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    is_trainer_slow: bool,
    flags: str,
) -> None:
    train = PPOTrainerAsync.ppo_train

    def train_slowly(trainer: PPOTrainerAsync, *args: object) -> object:
        time.sleep(1.5)
        return train(trainer, *args)  # type: ignore[arg-type]

    if is_trainer_slow:
        monkeypatch.setattr(PPOTrainerAsync, "ppo_train", train_slowly)
    given["remote_rm_url"] = tmp_path / "slow.py"
    seconds = 0 if is_trainer_slow else 1.5
    given["remote_rm_url"].write_text(SLOW_REWARD.format(seconds=seconds))
    steps = run(FLAGS + f"--num_episodes 2 {flags}", **given)
    limit = trainers[0].limits.max_staleness
    check_balanced(trainers[0], given["save_path"], num_drawn=22)
    assert max(histogram(steps)) <= limit
    assert max(step["queue/num_ready"] for step in steps) <= 4 * limit
    if is_trainer_slow:
        assert max(histogram(steps)) == limit
        assert sum(step.get("timing/generation_blocked", 0.0) for step in steps) > 1
    else:
        assert sum(step["timing/wait"] for step in steps) > 1


def test_reward_models_on_devices_of_the_policy_take_turns_with_it(
    ray_cluster: None,
    given: dict,
    reward_model_dir: Path,
    trainers: Trainers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans: dict[str, list[tuple[float, float]]] = {"ppo_train": [], "_forward": []}

    def noting(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def noted(*args: object) -> object:
            start = time.monotonic()
            answer = method(*args)
            spans[name].append((start, time.monotonic()))
            return answer

        monkeypatch.setattr(owner, name, noted)

    noting(PPOTrainerAsync, "ppo_train")
    noting(ModelScorer, "_forward")
    del given["remote_rm_url"]
    given["reward_pretrain"] = reward_model_dir
    run(FLAGS + "--colocate_all_models --num_episodes 3 --partial_rollout", **given)
    check_balanced(trainers[0], given["save_path"], num_drawn=33)
    assert len(spans["ppo_train"]) == 9 and len(spans["_forward"]) >= 9
    for start, end in spans["ppo_train"]:
        assert not [span for span in spans["_forward"] if span[0] < end and span[1] > start]


# A step; a copy of the weights left behind in each would be 0.43. The engine's heap grows by about
# 1 MB with some new sizes of batches, and stays there when it has seen them.
MAX_SLOPE_MB = {"controller": 0.1, "PolicyModelActor": 0.1, "LLMRayActor": 0.35}


@pytest.mark.timeout(600)
def test_memory_does_not_grow_over_hundreds_of_steps(
    ray_cluster: None,
    given: dict,
    trainers: Trainers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[dict[str, float]] = []
    settle = PPOTrainerAsync.settle

    def settle_and_look(trainer: PPOTrainerAsync) -> None:
        settle(trainer)
        if trainer.state.global_step % 10 == 0:
            sizes.append(resident_mb())

    monkeypatch.setattr(PPOTrainerAsync, "settle", settle_and_look)
    run(FLAGS + "--num_episodes 75 --partial_rollout", **given)
    assert trainers[0].state.global_step == 207
    late = sizes[len(sizes) // 3 :]
    for role, most in MAX_SLOPE_MB.items():
        growth = slope([size[role] for size in late]) / 10
        assert growth < most, f"{role}: {growth:.3f} MB a step, {sizes}"


def resident_mb() -> dict[str, float]:
    """Own memory of the controller, the engine and the trainer's rank.

    Without shared pages: those of Ray's object store are counted in every process that read them.
    """
    roles = {title: workers(title) for title in ("LLMRayActor", "PolicyModelActor")}
    found = {}
    for role, [process] in (roles | {"controller": [psutil.Process()]}).items():
        memory = process.memory_info()
        found[role] = (memory.rss - memory.shared) / 1e6
    return found


def slope(values: list[float]) -> float:
    """Least squares, in units of the distance between two values."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    top = sum((k - middle) * (value - mean) for k, value in enumerate(values))
    return top / sum((k - middle) ** 2 for k in range(len(values)))
