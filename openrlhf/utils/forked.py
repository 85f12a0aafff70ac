"""A function over many items in forked processes, for Python code that keeps one core busy.

Forked processes share what is in memory, so rows and tokenizers are neither copied nor loaded
again. They end with this process, however it ends. Knows nothing of what is computed.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from openrlhf.errors import OpenRLHFError
from openrlhf.utils.logging import warn

DEADLINE_S = 600.0  # for one item
PR_SET_PDEATHSIG = 1

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_forked(
    function: Callable[[Item], Result], items: Sequence[Item], *, num_processes: int
) -> Iterator[Result]:
    """The function of every item, in order; computed here where one process is enough.

    Items are dealt like cards, so those of like size keep all processes busy. Results must pickle.
    An OpenRLHFError of the function is raised here in its turn. What a process that died or hung
    owes is computed here.
    """
    num_processes = min(num_processes, len(items))
    if num_processes < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(function, items)
        return
    workers = [_Worker(function, items[k::num_processes]) for k in range(num_processes)]
    try:
        for index, item in enumerate(items):
            yield workers[index % num_processes].result_of(item)
    finally:
        for worker in workers:
            worker.end()


class _Worker(Generic[Item, Result]):
    """A process with its share of the items, seen from its parent."""

    def __init__(self, function: Callable[[Item], Result], items: Sequence[Item]) -> None:
        context = multiprocessing.get_context("fork")
        self._function = function
        self._results, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_work, args=(function, items, theirs, os.getpid()), daemon=True
        )
        self._process.start()
        theirs.close()
        self._is_lost = False

    def result_of(self, item: Item) -> Result:
        """The result of its next item."""
        if self._is_lost:
            return self._function(item)
        try:
            if not self._results.poll(DEADLINE_S):
                raise TimeoutError
            error, result = self._results.recv()
        except (EOFError, OSError):
            self.end()
            self._is_lost = True
            warn(
                f"a process that was to prepare rows is gone (exit code {self._process.exitcode}); "
                "its share is done in this one."
            )
            return self._function(item)
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """End the process, finished or not."""
        self._process.kill()
        self._process.join()
        self._results.close()


def _work(
    function: Callable[[Item], Result], items: Sequence[Item], results: Connection, parent: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes
    with suppress(AttributeError, OSError):  # not Linux: then a broken pipe ends it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        return
    gc.freeze()  # or else collecting garbage would copy the pages of all that is shared
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process of its own
    with suppress(BrokenPipeError):
        for item in items:
            try:
                results.send((None, function(item)))
            except OpenRLHFError as error:
                results.send((error, None))
                return
