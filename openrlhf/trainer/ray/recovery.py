"""New engines in place of lost ones, while the others go on."""

import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.errors import (
    EngineError,
    LostEngineError,
    LostRankError,
    NoRestartError,
    OpenRLHFError,
)
from openrlhf.trainer.ray.restarts import PAUSE_S, Restarts
from openrlhf.trainer.ray.vllm_engine import RayEngine
from openrlhf.utils.console import notice, warn
from openrlhf.utils.progress import saying_what_is_awaited
from openrlhf.utils.threads import start_thread

CLOSE_S = 10.0
RETRY_S = 1.0


class EngineRecovery:
    """Starts a new engine in place of each that is lost, in a thread of its own."""

    def __init__(self, engines: Sequence[RayEngine], restarts: Restarts) -> None:
        self._engines, self._restarts = engines, restarts
        self._device_lock: AbstractContextManager[object] = nullcontext()
        self._update: Callable[[RayEngine], None] | None = None
        self._sleeps = False
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        for engine in engines:
            engine.on_lost = self.lose

    def prepare(
        self,
        device_lock: AbstractContextManager[object],
        update: Callable[[RayEngine], None],
        *,
        sleeps: bool = False,
    ) -> None:
        """Have `update` send weights to each new engine, and let it be used then. `device_lock` is
        held while an engine takes its devices; one that `sleeps` gives them to the trainer while it
        waits for weights.
        """
        self._device_lock, self._update, self._sleeps = device_lock, update, sleeps

    @property
    def num_losses(self) -> int:
        """Return the losses of the run that were made good, of engines and ranks."""
        return self._restarts.num_losses

    def lose(self, engine: RayEngine, why: LostEngineError) -> None:
        """Replace an engine, unless that is under way."""
        with self._lock:
            if self._closed.is_set() or engine.is_lost:
                return
            engine.is_lost = True
        # A request is named "<step>/<row>"; that of an agent has more parts after these.
        rows = {row for name in [*engine.requests.values()] for row in name.split("/")[1:2]}
        replace = partial(self._replace, engine, why, rows)
        self._threads.append(start_thread(f"new {engine.name}", replace, engine.give_up))

    def close(self) -> None:
        """End all engines; replace none any more."""
        with self._lock:
            self._closed.set()
        for engine in self._engines:
            engine.give_up(EngineError("engines are ended with the run"))
            engine.kill()
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _replace(self, engine: RayEngine, why: EngineError, rows: Set[str]) -> None:
        lost_at = time.monotonic()
        engine.kill()  # whoever waits for one that hangs may hold the lock for the next
        while not self._closed.is_set():
            count = self._restarts.note("vllm", why, who=engine.name, rows=rows)
            rows = frozenset()  # of one that does not start
            warn(f"{why}; a new one starts in its place: {count}.")
            try:
                self._start_again(engine)
            except NoRestartError:
                raise
            except OpenRLHFError as error:  # memory that the dead one still holds, a taken port
                why = LostEngineError(str(error))
                engine.kill()
                self._closed.wait(PAUSE_S)
            else:
                if self._closed.is_set():
                    return
                seconds = time.monotonic() - lost_at
                notice(f"engine {engine.who} is up again, {seconds:.1f} s after it was lost")
                return

    def _start_again(self, engine: RayEngine) -> None:
        """Start an engine and give it weights, which may have to wait until the trainer is started
        again; return at once if all engines are ended.
        """
        with self._device_lock:
            with self._lock:  # `close` kills all that are started
                if self._closed.is_set():
                    return
                engine.restart()
            with saying_what_is_awaited(f"{engine.name} to start again: see {engine.log}*"):
                engine.ready_again()
            has_weights = self._update_weights(engine)
        while not (has_weights or self._closed.is_set()):
            time.sleep(RETRY_S)
            if engine.waits_for is None:
                with self._device_lock:
                    for part in ("weights", "kv_cache") if self._sleeps else ():
                        engine.call(VLLMEngine.wake_up, part)
                    has_weights = self._update_weights(engine)

    def _update_weights(self, engine: RayEngine) -> bool:
        """Return True if the engine has its weights; False if the trainer has lost a rank: then an
        engine that gives its devices to the trainer sleeps.
        """
        if self._update is None:  # the run has not begun
            engine.is_lost = False
            return True
        try:
            self._update(engine)  # and have it used
        except LostRankError:
            if self._sleeps:
                engine.call(VLLMEngine.sleep)
            return False
        return True
