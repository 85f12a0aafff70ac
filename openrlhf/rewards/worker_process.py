"""The parent's side of a reward worker: start it, ask it, kill it at its limits."""

from __future__ import annotations

import json
import os
import pickle
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.answers import RewardBatch
from openrlhf.rewards.worker import DUMP_SIGNAL
from openrlhf.utils.processes import MARK_VARIABLE, end_marked, new_mark, resident_gib

MAX_LOG_BYTES = 64 * 2**20  # of what a worker printed; as much again is kept beside it
LOAD_TIMEOUT_S = 600.0  # for what a file does when it is imported, such as loading a model
TIMED_OUT = "did not end in"
POLL_S = 0.05  # between two looks at a worker's clock and memory
DUMP_S = 0.1  # for a hanging worker to write its stack
CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class WorkerLimits:
    """What a worker may take."""

    timeout_s: float = 300.0  # for one call of the function
    memory_gib: float = 8.0  # resident, of the worker itself


class Mailbox:
    """Where a worker hands in replies: a socket that it connects to when it has one, and that
    nothing it does can keep the reader waiting at. What comes without the token is dropped.
    """

    def __init__(self) -> None:
        # A short path: the address of a socket has at most 107 bytes.
        self._folder = tempfile.TemporaryDirectory(
            dir="/tmp" if os.access("/tmp", os.W_OK) else None
        )
        self.address = str(Path(self._folder.name, "mailbox"))
        self.token = new_mark()  # of the reply that is due
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def poll(self, seconds: float) -> tuple[socket.socket, dict[str, Any]] | None:
        """Take in what there is: the reply and the connection it came by, or None as yet."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                connection, _ = self._listener.accept()
                self._selector.register(connection, selectors.EVENT_READ, bytearray())
                continue
            connection = key.fileobj  # type: ignore[assignment]
            data = b""
            with suppress(ConnectionError):
                data = connection.recv(CHUNK_BYTES)
            if data:
                key.data.extend(data)
                continue
            self._selector.unregister(connection)
            token, _, reply = bytes(key.data).partition(b"\n")
            with suppress(ValueError):
                if token == self.token.encode():
                    return connection, json.loads(reply)
            connection.close()
        return None

    def close(self) -> None:
        """Free what is held."""
        for key in list((self._selector.get_map() or {}).values()):  # it may be closed already
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._folder.cleanup()


class WorkerProcess:
    """A running worker with the function loaded."""

    def __init__(self, path: str, limits: WorkerLimits, log_path: Path | None) -> None:
        """Start it; raises ConfigError for what is wrong with the file."""
        self.path = path
        self.limits = limits
        self.log_path = log_path
        self.mark = new_mark()
        self.mailbox = Mailbox()
        self.connection: socket.socket | None = None  # by which the worker waits for its next batch
        self.process = _start(path, self.mailbox, log_path, self.mark)
        reply = self._receive(LOAD_TIMEOUT_S, LOAD_TIMEOUT_S, self._load_problem)
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

        if self.log_path is not None:
            _rotate(self.log_path)
        start_s = time.monotonic()
        self.mailbox.token = new_mark()
        assert self.connection is not None, "the worker has not answered its last batch"
        self.connection.settimeout(self.limits.timeout_s)
        with suppress(OSError), self.connection:  # noticed below
            self.connection.sendall(pickle.dumps((self.mailbox.token, batch)))
        left_s = start_s + self.limits.timeout_s - time.monotonic()
        return self._receive(left_s, self.limits.timeout_s, problem)

    def end(self) -> None:
        """End it and what it started, from any thread; a call in progress fails."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        end_marked(self.mark, but=self.process.pid)

    def kill(self) -> int:
        """End it and free what is held for it; answers its exit code."""
        self.end()
        if self.connection is not None:
            self.connection.close()
        self.mailbox.close()
        return self.process.wait()

    def _receive(
        self, left_s: float, timeout_s: float, problem: Callable[[str], RewardError | ConfigError]
    ) -> dict[str, Any]:
        """Wait for the whole reply for as long as is left of the limit."""
        deadline = time.monotonic() + left_s
        while True:
            is_alive = self.is_alive  # before the look: it may hand in its reply and end
            if found := self.mailbox.poll(POLL_S if is_alive else 0.0):
                self.connection, reply = found
                return reply
            if not is_alive:
                raise problem(f"ended its process ({_exit_in_words(self.kill())})")
            if time.monotonic() > deadline:
                self._dump_stack()
                self.kill()
                raise problem(f"{TIMED_OUT} {timeout_s:g} s")
            if self.is_too_large:
                self.kill()
                raise problem(
                    f"took more than {self.limits.memory_gib:g} GiB (--reward_memory_gib)"
                )

    def _load_problem(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: the file {what} while it was imported.{self._log_hint}")

    @property
    def _log_hint(self) -> str:
        return f" See {self.log_path}." if self.log_path else ""

    def _dump_stack(self) -> None:
        self.process.send_signal(DUMP_SIGNAL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(DUMP_S)


def _start(
    path: str, mailbox: Mailbox, log_path: Path | None, mark: str
) -> subprocess.Popen[bytes]:
    """The process, in a session of its own so that what it starts can be ended with it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment[MARK_VARIABLE] = mark
    environment.setdefault("OMP_NUM_THREADS", "1")  # several workers share the cores
    arguments = [mailbox.address, mailbox.token, path, str(os.getpid())]
    with ExitStack() as stack:
        output: Any = subprocess.DEVNULL
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(log_path.open("ab"))
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "openrlhf.rewards.worker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )


def _rotate(path: Path) -> None:
    """Move what a large log holds to `<name>.1`; the worker, which appends, goes on in the empty
    file.
    """
    with suppress(OSError):  # a log is not worth a run
        if path.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)


def _exit_in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}"
