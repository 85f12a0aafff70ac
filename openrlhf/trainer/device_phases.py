"""Who holds device memory in which phase of a step."""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from openrlhf.engines.base import RolloutEngine
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.errors import CheckpointError, LostEngineError, NumericsError
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.workers.model_worker import TrainedWorker


class DevicePhases:
    """Holders of device memory by phase: wakes and sleeps engines and training states around
    rollout, update and sync.

    A sleeping engine forgets its weights: they are sent anew before it is used again. Without sleep
    flags every phase is entered and left for free.
    """

    def __init__(
        self,
        engines: Iterable[RolloutEngine],
        *,
        engines_sleep: bool,
        training_sleeps: bool,
        device_lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """`device_lock`: held while training or a sync has the devices; others who compute there,
        such as reward models that score during training, hold it too.
        """
        self.device_lock = nullcontext() if device_lock is None else device_lock
        self.engines = list(engines) if engines_sleep else []
        self.training_sleeps = training_sleeps
        self.awake: set[str] = {"weights", "kv_cache"}
        # Seconds that engines and training states took to leave the devices and to come back.
        self.moving_s = 0.0

    @contextmanager
    def _moving(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.moving_s += time.monotonic() - start

    @property
    def needs_weights(self) -> bool:
        """Return True if the engines hold no weights and wait for a sync."""
        return "weights" not in self.awake

    def put_away(self, group: WorkerGroup) -> None:
        """Move the group's training states off the device until its update."""
        if self.training_sleeps:
            with self._moving():
                group.call(TrainedWorker.offload_states)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Wake the engines wholly; they stay awake until training needs the memory."""
        assert not self.needs_weights, "engines were put to sleep and got no weights since"
        self._wake("kv_cache")
        yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Have the engines sleep inside."""
        with self.device_lock:
            self.sleep()
            yield

    @contextmanager
    def update(self, group: WorkerGroup) -> Iterator[None]:
        """Hold the group's training states on the device inside."""
        if self.training_sleeps:
            with self._moving():
                group.call(TrainedWorker.reload_states)
        try:
            yield
        except (CheckpointError, NumericsError):  # of all ranks; after others, peers may hang
            self.put_away(group)
            raise
        self.put_away(group)

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Give the engines room for their weights inside."""
        with self.device_lock:
            self._wake("weights")
            yield

    def _wake(self, tag: str) -> None:
        if tag not in self.awake:
            self._on_all(VLLMEngine.wake_up, tag)
            self.awake.add(tag)

    def sleep(self) -> None:
        """Put the engines to sleep; at first before any model is loaded."""
        if self.engines and self.awake:
            self._on_all(VLLMEngine.sleep)
            self.awake.clear()

    def _on_all(self, method: Callable[..., None], *args: object) -> None:
        """Make the call on all engines at once: each may take a second. An engine that is started
        in place of another has all of its memory.
        """

        def call(engine: RolloutEngine) -> None:
            with suppress(LostEngineError):  # it is replaced
                engine.call(method, *args)

        num_calls = max(len(self.engines), 1)
        with self._moving(), ThreadPoolExecutor(max_workers=num_calls) as pool:
            list(pool.map(call, [engine for engine in self.engines if engine.is_up]))
