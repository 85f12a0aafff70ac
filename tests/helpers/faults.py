"""Faults in a running RL command: which process, in which phase of which step, how; and the seconds
until another stands in its place.
"""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from openrlhf.distributed.checkpoints import RunCheckpoints
from openrlhf.trainer.ppo_state import RunState
from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.restarts import Restarts
from tests.helpers.processes import wait_until, workers

PHASES = {
    "generate": (PPOTrainer, "generate"),
    "score": (PPOTrainer, "train_step"),
    "update": (PPOTrainer, "ppo_train"),
    "sync": (PPOTrainer, "broadcast_to_vllm"),
    "save": (RunState, "take"),
    "write": (RunCheckpoints, "_write"),  # beside the next step
}
ENGINE, ACTOR = "LLMRayActor", "PolicyModelActor"
CRITIC, REFERENCE = "CriticModelActor", "ReferenceModelActor"
REWARD_MODEL = "RewardModelActor"
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
Fault = tuple[str, str, signal.Signals]  # whom ("a+b": both), in which phase, how


@dataclass
class Faults:
    """Strikes one process in each step, in the phase that is its turn; the step after it begins
    once all engines are up, so that none is struck while it starts.
    """

    plan: dict[int, Fault] = field(default_factory=dict)  # by step
    struck_at: dict[int, float] = field(default_factory=dict)
    named: dict[int, float] = field(default_factory=dict)  # seconds until it was known to be lost
    seconds: dict[int, float] = field(default_factory=dict)  # until there was another one
    trainers: list[Any] = field(default_factory=list)
    step: int = 0
    find: Callable[[str], list[psutil.Process]] = workers  # the processes of a name

    def begin(self, trainer: Any, phase: str) -> None:
        """Strike if it is the turn of this phase."""
        if phase == "generate":
            wait_until(lambda: all(engine.is_up for engine in trainer.engines), 240)
            self.trainers, self.step = [trainer], trainer.state.global_step + 1
        # A checkpoint may be written when the next step has begun.
        for step in (self.step, self.step - 1) if phase == "write" else (self.step,):
            title, when, how = self.plan.get(step, ("", "", KILL))
            if when == phase and step not in self.struck_at:
                break
        else:
            return
        delay_s = 0.03 if phase == "generate" else 0.0
        strike = threading.Timer(delay_s, self._strike, (step, title, how))
        strike.start()
        if not delay_s:
            strike.join()

    def _strike(self, step: int, title: str, how: signal.Signals) -> None:
        found = [
            sorted(self.find(name), key=lambda process: process.pid) for name in title.split("+")
        ]
        self.struck_at[step] = time.monotonic()
        for processes in found:
            processes[-1].send_signal(how)

    def known(self) -> None:
        """Note that the last one is known to be lost."""
        if self.struck_at:
            step = max(self.struck_at)
            self.named.setdefault(step, time.monotonic() - self.struck_at[step])

    def replaced(self) -> None:
        """Note that there is another process in place of the last one."""
        if self.struck_at:
            step = max(self.struck_at)
            self.seconds[step] = time.monotonic() - self.struck_at[step]

    def show(self, what: str) -> None:
        """Print the seconds of every fault."""
        for step, (title, phase, how) in self.plan.items():
            print(f"{what}: {how.name} of {title} in {phase}: {self.seconds[step]:.1f} s")


def hook(patch: pytest.MonkeyPatch, kind: Any, name: str, **calls: Callable[..., None]) -> None:
    """Have a method call `before` and `after` with its object, or a function of a module with its
    first argument.
    """
    method = getattr(kind, name)

    def run(self: Any, *args: Any, **named: Any) -> Any:
        calls.get("before", lambda _: None)(self)
        found = method(self, *args, **named)
        calls.get("after", lambda _: None)(self)
        return found

    patch.setattr(kind, name, run)


def hooked(patch: pytest.MonkeyPatch, faults: Faults) -> Faults:
    """Have a command that runs in this process tell of its phases, and of what it replaced."""
    for phase, (kind, name) in PHASES.items():
        hook(patch, kind, name, before=lambda it, phase=phase: faults.begin(it, phase))
    for kind, name in (
        (PPOTrainer, "update_engine"),
        (PPOTrainer, "start_again"),
        (RayActorGroup, "start_again"),
    ):
        hook(patch, kind, name, after=lambda _: faults.replaced())
    hook(patch, Restarts, "note", before=lambda _: faults.known())
    return faults
