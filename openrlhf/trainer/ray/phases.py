"""Who holds device memory in which phase, when models and engines share devices.

Without sleep flags every phase is entered and left for free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.ray.model_actor import ModelWorker


class Sleeper(Protocol):
    """What can give its device memory back."""

    def sleep(self) -> None:
        """Give memory back."""

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take memory again."""


class DevicePhases:
    """Wakes and sleeps engines and training states around rollout, update and sync."""

    def __init__(self, engines: Iterable[Sleeper], *, engines_sleep: bool, training_sleeps: bool):
        self.engines = list(engines) if engines_sleep else []
        self.training_sleeps = training_sleeps

    def start(self, groups: Iterable[WorkerGroup]) -> None:
        """Put everything to sleep once all is loaded."""
        for engine in self.engines:
            engine.sleep()
        for group in groups if self.training_sleeps else ():
            group.call(ModelWorker.offload_states)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Engines are awake inside."""
        for engine in self.engines:
            engine.wake_up()
        yield
        for engine in self.engines:
            engine.sleep()

    @contextmanager
    def update(self, group: WorkerGroup) -> Iterator[None]:
        """The group's training states are on the device inside."""
        if self.training_sleeps:
            group.call(ModelWorker.reload_states)
        yield
        if self.training_sleeps:
            group.call(ModelWorker.offload_states)

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Engines hold their weights, without cache, inside."""
        for engine in self.engines:
            engine.wake_up(("weights",))
        yield
        for engine in self.engines:
            engine.sleep()
