"""Compares mathematical answers in helper processes, for threads: there no signal can cut off what
takes too long, but a process can be ended.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from openrlhf.errors import RewardError

MAX_PROCESSES = 4  # about 100 MB each; they stay for the next comparison
WAIT_S = 240.0  # for one that is free
START_S = 120.0  # for a busy machine to import what compares
LIMIT_S = 30.0  # for one comparison, its own time limits included
EXIT_S = 0.2  # for a process that hung up to end by itself


class MathProcess:
    """A running helper."""

    def __init__(self) -> None:
        """Start it; raises RewardError when it does not come up."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "openrlhf.rewards.math_helper", str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # an interrupt from the keyboard is its caller's
            )
        self.connection = Connection(ours.detach())
        try:
            self._reply(START_S)
        except (TimeoutError, EOFError, ConnectionError) as error:
            raise RewardError(
                f"the helper process of math_equal did not start (exit code {self.end()}). "
                "See what it printed."
            ) from error

    @property
    def is_alive(self) -> bool:
        """Whether it runs; False once its end was noticed."""
        return self.process.poll() is None

    def compare(self, answer: str, truth: str) -> bool:
        """See `math_equal`; False as well when that takes too long, after which it is dead."""
        with suppress(ConnectionError):  # noticed below
            self.connection.send_bytes(json.dumps([answer, truth]).encode())
        try:
            return self._reply(LIMIT_S)
        except TimeoutError:
            self.end()
            return False
        except (EOFError, ConnectionError) as error:
            raise RewardError(
                f"the helper process of math_equal ended (exit code {self.end()})"
            ) from error

    def end(self) -> int:
        """End it and free what is held for it; answers its exit code."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_S)
        self.process.kill()
        self.connection.close()
        return self.process.wait()

    def _reply(self, seconds: float) -> bool:
        if not self.connection.poll(seconds):
            raise TimeoutError
        return bool(json.loads(self.connection.recv_bytes()))


class MathProcesses:
    """Helpers for any number of threads, started when they are needed."""

    def __init__(self) -> None:
        self._free: queue.LifoQueue[MathProcess | None] = queue.LifoQueue()
        self.forget()

    def forget(self) -> None:
        """Begin without any, as in a forked process: those that run belong to its parent."""
        self._free = queue.LifoQueue()
        for _ in range(MAX_PROCESSES):
            self._free.put(None)

    def compare(self, answer: str, truth: str) -> bool:
        """See MathProcess; waits for a helper that is free."""
        try:
            process = self._free.get(timeout=WAIT_S)
        except queue.Empty:
            raise RewardError(
                f"math_equal: all {MAX_PROCESSES} helper processes were busy for {WAIT_S:.0f} s. "
                "Compare shorter answers, or fewer at once."
            ) from None
        try:
            if process is None or not process.is_alive:
                process = None
                process = MathProcess()
            return process.compare(answer, truth)
        finally:
            self._free.put(process)


MATH_PROCESSES = MathProcesses()
os.register_at_fork(after_in_child=MATH_PROCESSES.forget)
