"""The parent's side of a reward worker: start it, ask it, kill it at its limits."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.answers import RewardBatch
from openrlhf.rewards.family import FamilyWatch
from openrlhf.rewards.worker import DUMP_SIGNAL
from openrlhf.utils.processes import (
    MARK_VARIABLE,
    ProcessTable,
    end_all,
    end_marked,
    new_mark,
    resident_gib,
)

LOAD_TIMEOUT_S = 600.0  # for what a file does when it is imported, such as loading a model
TIMED_OUT = "did not end in"
POLL_S = 0.05  # between two looks at a worker's clock and memory
DUMP_S = 0.1  # for a hanging worker to write its stack
EXIT_S = 1.0  # for a worker that hung up to end by itself, and say how


@dataclass(frozen=True)
class WorkerLimits:
    """What a worker may take."""

    timeout_s: float = 300.0  # for one call of the function
    memory_gib: float = 8.0  # resident, of the worker and what it started
    num_processes: int = max(256, 16 * (os.cpu_count() or 1))  # the worker and what it started


class WorkerProcess:
    """A running worker with the function loaded."""

    def __init__(self, path: str, limits: WorkerLimits, log_path: Path | None) -> None:
        """Start it; raises ConfigError for what is wrong with the file."""
        self.path = path
        self.limits = limits
        self.log_path = log_path
        self.mark = new_mark()
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = _start(path, theirs, log_path, self.mark)
        self.connection = Connection(ours.detach())
        reply = self._receive(LOAD_TIMEOUT_S, self._load_problem)
        if "problems" in reply:
            self.kill()
            raise ConfigError(reply["problems"])

    @property
    def is_alive(self) -> bool:
        """Whether it runs; False once its end was noticed."""
        return self.process.poll() is None

    @property
    def is_too_large(self) -> bool:
        """Whether its own process holds more memory than it may."""
        return resident_gib(self.process.pid) > self.limits.memory_gib

    def answer(self, batch: RewardBatch) -> dict[str, Any]:
        """What the function answers; raises RewardError, after which the worker is dead if it did
        not answer.
        """

        def problem(what: str) -> RewardError:
            limit = " (--reward_timeout_s)" if what.startswith(TIMED_OUT) else ""
            return RewardError(
                f"{self.path}: the reward function {what}{limit} while it scored {batch.names()}. "
                f"Its worker was replaced.{self._log_hint}"
            )

        with suppress(ConnectionError):  # noticed below
            self.connection.send(batch)
        return self._receive(self.limits.timeout_s, problem)

    def end(self) -> None:
        """End it and what it started, from any thread; a call in progress fails."""
        family = ProcessTable().family(self.process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        end_all(pid for pid in family if pid != self.process.pid)
        end_marked(self.mark, but=self.process.pid)

    def kill(self) -> int:
        """End it and free what is held for it; answers its exit code."""
        self.end()
        self.connection.close()
        return self.process.wait()

    def _receive(
        self, timeout_s: float, problem: Callable[[str], RewardError | ConfigError]
    ) -> dict[str, Any]:
        with suppress(EOFError, ConnectionError):
            if self._has_answered(timeout_s, problem):
                return json.loads(self.connection.recv_bytes())  # type: ignore[no-any-return]
        self._wait(EXIT_S)
        raise problem(f"ended its process ({_exit_in_words(self.kill())})")

    def _has_answered(
        self, timeout_s: float, problem: Callable[[str], RewardError | ConfigError]
    ) -> bool:
        """Wait for an answer; False when the worker has ended without one."""
        deadline = time.monotonic() + timeout_s
        family = FamilyWatch(self.process.pid, self.limits.num_processes, self.limits.memory_gib)
        while not self.connection.poll(POLL_S):
            if not self.is_alive:  # what it started may still hold the connection
                return self.connection.poll()
            if time.monotonic() > deadline:
                self._dump_stack()
                self.kill()
                raise problem(f"{TIMED_OUT} {timeout_s:g} s")
            if self.is_too_large:
                self.kill()
                raise problem(
                    f"took more than {self.limits.memory_gib:g} GiB (--reward_memory_gib)"
                )
            if excess := family.excess():
                self.kill()
                raise problem(excess)
        return True

    def _load_problem(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: the file {what} while it was imported.{self._log_hint}")

    @property
    def _log_hint(self) -> str:
        return f" See {self.log_path}." if self.log_path else ""

    def _dump_stack(self) -> None:
        self.process.send_signal(DUMP_SIGNAL)
        self._wait(DUMP_S)

    def _wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)


def _start(
    path: str, theirs: socket.socket, log_path: Path | None, mark: str
) -> subprocess.Popen[bytes]:
    """The process, in a session of its own so that what it starts can be ended with it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment[MARK_VARIABLE] = mark
    environment.setdefault("OMP_NUM_THREADS", "1")  # several workers share the cores
    arguments = [str(theirs.fileno()), path, str(os.getpid())]
    with ExitStack() as stack:
        output: Any = subprocess.DEVNULL
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(log_path.open("ab"))
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "openrlhf.rewards.worker", *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )


def _exit_in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}"
