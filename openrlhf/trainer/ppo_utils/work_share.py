"""Work shared over hosts as it comes: every job goes to the host with the least to do, and results
are told as they are finished.

Jobs are requests for engines or episodes of agents. One thread a host fetches results, whatever the
number of jobs.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from openrlhf.errors import EngineError
from openrlhf.utils.threads import start_thread

Item = TypeVar("Item")
Result = TypeVar("Result")

POLL_S = 2.0  # of one look at a host; a result ends it at once
CLOSE_S = 10.0  # until a host that does not let go is left behind
MAX_DESCRIBED = 4  # hosts that are told of by name


@dataclass(frozen=True)
class WorkHost(Generic[Item, Result]):
    """Something that works on items for several owners at a time."""

    submit: Callable[[str, Sequence[Item]], None]  # (owner, items): take items, do not wait
    finished: Callable[[str, float], list[Result]]  # (owner, seconds to wait for the first result)
    abandon: Callable[[str], None]  # (owner): forget its items; `finished` returns


@dataclass(frozen=True)
class WorkKind(Generic[Item, Result]):
    """What is shared: how items and results are told apart, and how much work an item is."""

    item_name: Callable[[Item], Hashable]
    result_name: Callable[[Result], Hashable]
    size: Callable[[Item], int]
    max_size: int | None = None  # most that a host is given at a time; None: all there is
    silence_s: float = 3600.0  # until a host with work that gives no sign ends everything


class WorkShare(Generic[Item, Result]):
    """Gives out jobs; a job is some items that stay together."""

    def __init__(
        self,
        hosts: Sequence[WorkHost[Item, Result]],
        kind: WorkKind[Item, Result],
        on_results: Callable[[list[Result]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Both are called from threads of this share; nothing comes after an error of a host."""
        self.hosts = list(hosts)
        self.kind = kind
        self.owner = secrets.token_hex(8)
        self._on_results = on_results
        self._on_error = on_error
        self._lock = threading.Lock()
        self._waiting: deque[Sequence[Item]] = deque()
        self._loads = [0] * len(self.hosts)
        self._places: dict[Hashable, tuple[int, int]] = {}  # name -> (host, size)
        self._heard_at = [time.monotonic()] * len(self.hosts)  # a result, or nothing to do
        self._is_closed = False
        self._listeners = [
            start_thread(f"work-share-{k}", partial(self._listen, k), self._fail)
            for k in range(len(self.hosts))
        ]

    def submit(self, job: Sequence[Item]) -> None:
        """Start a job on the host with the least to do, the first of several; it waits its turn
        while no host has room. Raises what the host raises.
        """
        with self._lock:
            self._waiting.append(job)
            self._hand_over()

    def describe(self) -> str:
        """Which hosts have work and for how long they gave no result, the most silent first; does
        not wait for anybody.
        """
        now = time.monotonic()
        busy = [(now - self._heard_at[k], k, load) for k, load in enumerate(self._loads) if load]
        words = [
            f"engine {k} has {load} samples, none finished for {silence_s:.0f} s"
            for silence_s, k, load in sorted(busy, reverse=True)[:MAX_DESCRIBED]
        ]
        num_more = len(busy) - len(words)
        return "; ".join([*words, f"{num_more} more engines work"] if num_more else words)

    def close(self) -> None:
        """Abandon all jobs and end the threads; their hosts live on."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._waiting.clear()
        abandoning = [
            start_thread(f"work-close-{k}", partial(host.abandon, self.owner), _ignore)
            for k, host in enumerate(self.hosts)
        ]
        deadline = time.monotonic() + CLOSE_S
        for thread in [*abandoning, *self._listeners]:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _hand_over(self) -> None:
        """Give out what waits, in order, as far as there is room; the lock is held."""
        while self._waiting and not self._is_closed:
            k = min(range(len(self.hosts)), key=self._loads.__getitem__)
            limit = self.kind.max_size
            if limit is not None and self._loads[k] >= limit:
                return
            job = self._waiting.popleft()
            for item in job:
                size = self.kind.size(item)
                self._places[self.kind.item_name(item)] = (k, size)
                self._loads[k] += size
            self.hosts[k].submit(self.owner, job)

    def _listen(self, k: int) -> None:
        """Fetch the results of a host until the share is closed; EngineError when it is silent."""
        while not self._is_closed:
            results = self.hosts[k].finished(self.owner, POLL_S)
            if self._take(results) or not self._loads[k]:
                self._heard_at[k] = time.monotonic()
            silence_s = time.monotonic() - self._heard_at[k]
            if silence_s > self.kind.silence_s:
                raise EngineError(
                    f"engine {k} of {len(self.hosts)} works on {self._loads[k]} samples and gave "
                    f"no sign for {silence_s:.0f} s"
                )

    def _take(self, results: list[Result]) -> bool:
        with self._lock:
            if self._is_closed or not results:
                return False
            for result in results:
                place, size = self._places.pop(self.kind.result_name(result))
                self._loads[place] -= size
            self._hand_over()
        self._on_results(results)
        return True

    def _fail(self, error: BaseException) -> None:
        if not self._is_closed:
            self._on_error(error)


def _ignore(error: BaseException) -> None:
    """A host that is down has forgotten everything."""
