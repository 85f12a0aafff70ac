"""New engines in place of lost ones, while the others go on; and the budget of restarts."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from openrlhf.errors import EngineError, LostEngineError
from openrlhf.trainer.ray.vllm_engine import RayEngine
from openrlhf.utils.console import notice, warn
from openrlhf.utils.threads import start_thread

HOUR_S = 3600.0
CLOSE_S = 10.0


class Restarts:
    """Counts the restarts of each role within the last hour."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._times: defaultdict[str, list[float]] = defaultdict(list)

    def note(self, role: str, why: EngineError) -> str:
        """Note one; return its number as words. Raise EngineError if there were too many."""
        now = time.monotonic()
        self._times[role] = [then for then in self._times[role] if now - then < HOUR_S]
        if len(self._times[role]) >= self.most:
            raise EngineError(
                f"{why}. It is not started again: {self.most} restart(s) of {role} within an hour "
                "are allowed (--max_restarts)."
            )
        self._times[role].append(now)
        return f"restart {len(self._times[role])} of {self.most} within an hour (--max_restarts)"


class EngineRecovery:
    """Starts a new engine in place of each that is lost, in a thread of its own."""

    def __init__(self, engines: Sequence[RayEngine], restarts: Restarts) -> None:
        self._engines, self._restarts = engines, restarts
        self._room: AbstractContextManager[object] = nullcontext()
        self._update: Callable[[RayEngine], None] | None = None
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        for engine in engines:
            engine.on_lost = self.lose

    def prepare(
        self, room: AbstractContextManager[object], update: Callable[[RayEngine], None]
    ) -> None:
        """Have `update` send weights to each new engine before it is used; `room` is held while an
        engine takes its devices.
        """
        self._room, self._update = room, update

    def lose(self, engine: RayEngine, why: LostEngineError) -> None:
        """Replace an engine, unless that is under way."""
        with self._lock:
            if self._is_closed or engine.is_lost:
                return
            engine.is_lost = True
        replace = partial(self._replace, engine, why)
        self._threads.append(start_thread(f"new {engine.name}", replace, engine.give_up))

    def close(self) -> None:
        """Replace none any more."""
        with self._lock:
            self._is_closed = True
        for engine in self._engines:
            engine.kill()
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _replace(self, engine: RayEngine, why: EngineError) -> None:
        lost_at = time.monotonic()
        while not self._is_closed:
            warn(f"{why}; a new one starts in its place: {self._restarts.note('vllm', why)}.")
            try:
                with self._room:
                    engine.restart()
                    if self._update is not None:
                        self._update(engine)
            except LostEngineError as error:
                why = error
            else:
                engine.is_lost = False
                seconds = time.monotonic() - lost_at
                notice(f"engine {engine.who} is up again, {seconds:.1f} s after it was lost")
                return
