"""Every process of a run is killed and stopped in every phase of a step. The run finishes: the same
steps, every prompt with one outcome. What it cannot outlive (Ray's own processes) ends it by name,
and the same command goes on. A table of the seconds is printed.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from openrlhf.cli import train_ppo_ray
from openrlhf.trainer.ppo_trainer import PPOTrainer
from tests.helpers.faults import (
    ACTOR,
    CRITIC,
    ENGINE,
    KILL,
    PHASES,
    REFERENCE,
    REWARD_MODEL,
    STOP,
    Faults,
    hook,
)
from tests.helpers.processes import ends, environment, started, wait_until
from tests.integration.commands import SMALL, argv, steps_of
from tests.integration.heads import free_ports
from tests.integration.ppo_runs import saved_run

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1200)]

FLAGS = (
    f"{SMALL} --n_samples_per_prompt 2 --max_samples 8 --rollout_batch_size 4 "
    "--train_batch_size 8 --generate_max_len 100 --actor_learning_rate 1e-3 "
    "--max_restarts 99 --engine_timeout_s 15 --rank_timeout_s 20 --vllm_num_engines 1"
)
# A step without a fault follows each with one.
STEPS = {2 * number: phase for number, phase in enumerate(PHASES, start=1)}
NUM_STEPS = max(STEPS) + 2
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = json.dumps({"rewards": [len(query) % 7 for query in body["query"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
AWAY_S = 3.0  # that a reward server is gone, or stopped


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], dict[str, float]]]:
    """Seconds by process and signal, then by phase; shown when all were measured."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    yield found
    rows = [f"{'process':<18} {'signal':<14}" + "".join(f"{name:>10}" for name in PHASES)]
    for (who, how), seconds in found.items():
        told = [f"{seconds[name]:.1f}" if name in seconds else "" for name in PHASES]
        rows.append(f"{who:<18} {how:<14}" + "".join(f"{word:>10}" for word in told))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n".join(["", *rows]))


def check(faults: Faults, given: dict) -> None:
    """Every step was made once, and every prompt of it has one outcome."""
    steps = steps_of(given["save_path"])
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    ledger = faults.trainers[0].sampler.ledger
    ledger.check()
    assert ledger.outcomes["trained"] == 4 * NUM_STEPS and not ledger.pending
    assert faults.struck_at.keys() == faults.plan.keys() == faults.seconds.keys()
    # Every sample was of the weights of its step: else its log-probs would be others.
    assert all(step["vllm_kl"] < 1e-6 for step in steps if "vllm_kl" in step)


@pytest.mark.parametrize("how", [KILL, STOP], ids=["kill", "stop"])
@pytest.mark.parametrize("title", [ENGINE, ACTOR, CRITIC, REFERENCE, REWARD_MODEL])
def test_engines_and_ranks_are_replaced(
    ray_cluster: None,
    given: dict,
    faults: Faults,
    critic_dir: Path,
    cells: dict,
    title: str,
    how: signal.Signals,
) -> None:
    faults.plan = {step: (title, phase, how) for step, phase in STEPS.items()}
    flags = (
        f"{FLAGS} --advantage_estimator gae --init_kl_coef 0.01 --save_steps 1 --zero_stage 2 "
        f"--actor_num_gpus_per_node 2 --num_episodes {NUM_STEPS // 2}"
    )
    given |= {"ckpt_path": given["save_path"] / "ckpt", "critic_pretrain": critic_dir}
    if title == REWARD_MODEL:
        given["reward_pretrain"] = critic_dir
        del given["remote_rm_url"]
    train_ppo_ray.main(argv("", sizes=flags, **given))
    check(faults, given)
    cells[title, how.name] = {STEPS[step]: seconds for step, seconds in faults.seconds.items()}
    known = {STEPS[step]: seconds for step, seconds in faults.named.items()}
    cells[title, f"{how.name} known"] = known
    # Processes are asked every 2 s, and what they say is read 2 s later.
    limit_s = 0.0 if how is KILL else 15.0 if title == ENGINE else 20.0
    assert known.keys() == PHASES.keys() and max(known.values()) <= limit_s + 5.0


@pytest.mark.parametrize("how", [KILL, STOP], ids=["kill", "stop"])
def test_two_that_are_lost_at_once_are_replaced(
    ray_cluster: None, given: dict, faults: Faults, critic_dir: Path, how: signal.Signals
) -> None:
    pairs = [
        f"{ACTOR}+{ENGINE}",
        f"{ACTOR}+{CRITIC}",
        f"{REFERENCE}+{CRITIC}",
        f"{ENGINE}+{REFERENCE}",
        f"{CRITIC}+{ENGINE}",
        f"{ACTOR}+{REFERENCE}+{ENGINE}",
    ]
    # In every phase, each time another pair.
    cells = zip(STEPS.items(), pairs, strict=True)
    faults.plan = {step: (pair, phase, how) for (step, phase), pair in cells}
    flags = (
        f"{FLAGS} --advantage_estimator gae --init_kl_coef 0.01 --save_steps 1 --zero_stage 2 "
        f"--actor_num_gpus_per_node 2 --num_episodes {NUM_STEPS // 2}"
    )
    given |= {"ckpt_path": given["save_path"] / "ckpt", "critic_pretrain": critic_dir}
    train_ppo_ray.main(argv("", sizes=flags, **given))
    check(faults, given)
    faults.show("two at once")


@dataclass
class Server:
    """A reward server that is back some seconds after it was struck."""

    script: Path
    port: int = field(default_factory=lambda: free_ports(1)[0])

    def __enter__(self) -> "Server":
        self.script.write_text(SERVER)
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        self.process = psutil.Popen([sys.executable, str(self.script), str(self.port)])

    def find(self, who: str) -> list[psutil.Process]:
        """The process, which somebody is about to strike."""
        threading.Timer(AWAY_S, self.come_back).start()
        return [psutil.Process(self.process.pid)]

    def come_back(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        else:
            self.start()


def reward_workers(who: str) -> list[psutil.Process]:
    """The processes in which reward functions run."""
    children = psutil.Process().children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.parametrize("how", [KILL, STOP], ids=["kill", "stop"])
@pytest.mark.parametrize("who", ["reward worker", "reward server"])
def test_what_gives_rewards_may_go_away(
    ray_cluster: None,
    given: dict,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cells: dict,
    who: str,
    how: signal.Signals,
) -> None:
    faults.plan = {step: (who, phase, how) for step, phase in STEPS.items()}
    hook(monkeypatch, PPOTrainer, "report", after=lambda _: faults.replaced())
    flags = (
        f"{FLAGS} --advantage_estimator group_norm --init_kl_coef 0 --reward_timeout_s 15 "
        f"--save_steps 1 --num_episodes {NUM_STEPS // 2}"
    )
    given |= {"ckpt_path": given["save_path"] / "ckpt"}
    with Server(tmp_path / "server.py") as server:
        faults.find = reward_workers
        if who == "reward server":
            faults.find = server.find
            given |= {"remote_rm_url": f"http://127.0.0.1:{server.port}/get_reward"}
        train_ppo_ray.main(argv("", sizes=flags, **given))
    check(faults, given)
    cells[who, how.name] = {STEPS[step]: seconds for step, seconds in faults.seconds.items()}


STRIKE = """
import json, sys, time
from pathlib import Path
import psutil
import pytest
from openrlhf.cli import train_ppo_ray
from tests.helpers.faults import Faults, hooked

program, how, phase, struck, *words = sys.argv[1:]

class Once(Faults):
    def begin(self, trainer, phase_now):
        if not self.plan:  # in the second step of this start
            self.plan = {trainer.state.global_step + 2: (program, phase, int(how))}
        super().begin(trainer, phase_now)

def find(name):
    own = psutil.Process()
    family = own.children(recursive=True)
    facts = {"at": time.monotonic(), "pids": [child.pid for child in family]}
    Path(struck).write_text(json.dumps(facts))
    return [own] if name == "driver" else [child for child in family if child.name() == name]

with pytest.MonkeyPatch.context() as patch:
    hooked(patch, Once(find=find))
    train_ppo_ray.main(words)
"""


RAYS = {"raylet": "Ray's raylet ", "gcs_server": "Ray's GCS "}


@pytest.mark.parametrize(
    ("program", "how"),
    [
        *(("raylet", KILL), ("raylet", STOP), ("gcs_server", KILL), ("gcs_server", STOP)),
        ("driver", KILL),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_ends_a_run_lets_the_same_command_go_on(
    given: dict, tmp_path: Path, cells: dict, program: str, how: signal.Signals
) -> None:
    flags = (
        f"{FLAGS} --advantage_estimator group_norm --init_kl_coef 0 --load_checkpoint "
        f"--save_steps 1 --num_episodes {NUM_STEPS // 2}"
    )
    seconds, struck, is_done = {}, tmp_path / "struck.json", True
    for phase in PHASES:
        if is_done:
            given["save_path"] = tmp_path / phase
        words = argv("", sizes=flags, **given, ckpt_path=given["save_path"] / "ckpt")
        strike = [sys.executable, "-c", STRIKE, program, str(how.value), phase, str(struck)]
        with started([*strike, *words], env=environment()) as process:
            _, said = process.communicate(timeout=240)
            ended_at = time.monotonic()
        # A run that needs no new process may be done before a GCS that stopped is missed.
        is_done = (program, how, process.returncode) == ("gcs_server", STOP, 0)
        if program == "driver":
            assert process.returncode == -KILL
        elif not is_done:  # Ray may end the driver before it can: with 1
            assert process.returncode in (1, 3) and f"error: {RAYS[program]}" in said, said[-3000:]
        facts = json.loads(struck.read_text())
        seconds[phase] = ended_at - facts["at"]
        assert ends(*facts["pids"]), "orphans"
    command = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *words]
    subprocess.run(command, check=True, env=environment(), timeout=300)
    assert [s["step"] for s in steps_of(given["save_path"])] == list(range(1, NUM_STEPS + 1))
    sampler = saved_run(given["save_path"] / "ckpt" / f"global_step{NUM_STEPS}")["sampler"]
    assert sampler["ledger"]["outcomes"] == {"trained": 4 * NUM_STEPS}
    cells[program, how.name] = seconds


@pytest.mark.parametrize("phase", ["generate", "update", "sync"])
def test_a_driver_that_is_stopped_for_a_while_goes_on(
    given: dict, tmp_path: Path, phase: str
) -> None:
    flags = f"{FLAGS} --advantage_estimator group_norm --init_kl_coef 0 --num_episodes 2"
    struck = tmp_path / "struck.json"
    strike = [sys.executable, "-c", STRIKE, "driver", str(STOP.value), phase, str(struck)]
    with started([*strike, *argv("", sizes=flags, **given)], env=environment()) as process:
        wait_until(struck.exists, 120)
        time.sleep(30)
        assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said[-3000:]
    assert "is started again" not in said
    assert [step["step"] for step in steps_of(given["save_path"])] == [1, 2, 3, 4]
