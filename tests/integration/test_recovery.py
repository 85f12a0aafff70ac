"""A run that loses processes goes on by itself: same steps, every prompt trained on once, engines
that hold the policy. Prints the seconds from each fault to a new engine that has proved to hold the
weights; its first token comes a forward pass later.
"""

import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from openrlhf.cli import train_ppo_ray
from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.trainer.ray.vllm_engine import RayEngine
from tests.helpers.processes import wait_until, workers
from tests.integration.commands import SMALL, argv, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1200)]

FLAGS = (
    "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 --max_samples 8 "
    "--rollout_batch_size 4 --train_batch_size 8 --num_episodes 4 --generate_max_len 200 "
    "--actor_learning_rate 1e-3 --max_restarts 9 --engine_timeout_s 15 --rank_timeout_s 300"
)
NUM_STEPS = 8
PHASES = {"generate": "generate", "update": "ppo_train", "sync": "broadcast_to_vllm"}
FAULTS = {
    2: ("generate", signal.SIGKILL),
    3: ("update", signal.SIGKILL),
    4: ("sync", signal.SIGKILL),
    5: ("generate", signal.SIGSTOP),
    6: ("update", signal.SIGSTOP),
    7: ("sync", signal.SIGSTOP),
}


@dataclass
class Faults:
    """Strikes one engine in each step, in the phase that is its turn; the step after it begins once
    all engines are up, so that none is struck while it starts.
    """

    struck_at: dict[int, float] = field(default_factory=dict)  # by step
    seconds: dict[int, float] = field(default_factory=dict)  # until a new engine was up
    trainers: list[PPOTrainer] = field(default_factory=list)
    step: int = 0

    def begin(self, trainer: PPOTrainer, phase: str) -> None:
        """Strike if it is the turn of this phase."""
        if phase == "generate":
            wait_until(lambda: all(engine.is_up for engine in trainer.engines), 240)
            self.trainers, self.step = [trainer], trainer.state.global_step + 1
        if FAULTS.get(self.step, ("",))[0] == phase and self.step not in self.struck_at:
            strike = threading.Timer(0.3 if phase == "generate" else 0.0, self._strike)
            strike.start()
            if phase == "sync":
                strike.join()

    def _strike(self) -> None:
        victim = sorted(workers("LLMRayActor"), key=lambda process: process.pid)[0]
        self.struck_at[self.step] = time.monotonic()
        victim.send_signal(FAULTS[self.step][1])

    def replaced(self) -> None:
        """Note that a new engine is up."""
        step = max(self.struck_at)
        self.seconds[step] = time.monotonic() - self.struck_at[step]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults, update_engine = Faults(), PPOTrainer.update_engine

    def striking(phase: str) -> None:
        method = getattr(PPOTrainer, PHASES[phase])

        def run(trainer: PPOTrainer, *args: Any) -> Any:
            faults.begin(trainer, phase)
            return method(trainer, *args)

        monkeypatch.setattr(PPOTrainer, PHASES[phase], run)

    def update_and_note(trainer: PPOTrainer, engine: RayEngine) -> None:
        update_engine(trainer, engine)
        faults.replaced()

    for phase in PHASES:
        striking(phase)
    monkeypatch.setattr(PPOTrainer, "update_engine", update_and_note)
    return faults


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_run_goes_on_with_new_engines_in_place_of_lost_ones(
    ray_cluster: None, given: dict, faults: Faults, capsys: pytest.CaptureFixture, num_engines: int
) -> None:
    flags = f"{SMALL} {FLAGS} --vllm_num_engines {num_engines}"
    train_ppo_ray.main(argv("", sizes=flags, **given))
    steps = steps_of(given["save_path"])
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    # Every sample was the policy's of its step: else its log-probs would be others.
    assert all(step["vllm_kl"] < 1e-6 for step in steps if "vllm_kl" in step)
    [trainer] = faults.trainers
    ledger = trainer.sampler.ledger
    assert ledger.outcomes == {"trained": 32} and not ledger.pending
    assert sum(engine.num_starts for engine in trainer.engines) == num_engines + len(FAULTS)
    with capsys.disabled():
        for step, (phase, number) in FAULTS.items():
            name = signal.Signals(number).name
            print(f"{num_engines} engine(s), {name} in {phase}: {faults.seconds[step]:.1f} s")
