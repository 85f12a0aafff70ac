"""Ctrl-C, SIGTERM and the end of a terminal (SIGHUP): a training loop notes them and ends by
itself; elsewhere they raise.

A second signal ends the process at once, and so does the end of the grace time.
"""

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from openrlhf.utils.console import warn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTHING_SAVED = "nothing was saved yet. Type the same command to start again"
OVERDUE = "the step did not end in {:g} s (--grace_s); it was not saved"
HELD_S = 30.0  # outside of a loop
LEAVE_S = 10.0  # for the main thread to end a run that cannot go on
SAME_S = 2.0  # a launcher passes on what a terminal has sent to every process already


class Interrupted(KeyboardInterrupt):
    """The end of a run that was asked to stop; the message says what was saved and how to go on."""


class Left(KeyboardInterrupt):
    """A part of a loop was left because the process was asked to stop; the loop ends by itself."""


class _Listener:
    """Signals of this process, which reach the main thread only."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.grace_s: float | None = None  # of the loop that runs; None: there is none
        self.is_leavable = False
        self.asked_at: float | None = None
        self.is_overdue = False
        self.failure: BaseException | None = None  # to be raised by the main thread
        self.left = threading.Event()
        self.heard_at = 0.0
        self.blocked: Callable[[], str] = str  # what will hold the main thread for good, if any
        self.ended = threading.Event()

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. A forked process, such as those that tokenise, ignores Ctrl-C, which its
        parent handles, and exits at the others.
        """
        if os.getpid() != self.pid:
            if number != signal.SIGINT:
                os._exit(128 + number)
            return
        self.heard_at = time.monotonic()
        if number == signal.SIGHUP:
            _close_terminal()
        if self.failure is not None:
            raise self.failure
        if self.is_overdue:
            raise Interrupted(OVERDUE.format(self.grace_s))
        now, before = time.monotonic(), self.asked_at
        if before is not None and now - before < SAME_S:
            return
        self.asked_at = now
        if self.grace_s is None or before is not None:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        threading.Thread(target=self._end_grace, args=(name, self.grace_s), daemon=True).start()
        if self.is_leavable:
            raise KeyboardInterrupt

    def _end_grace(self, name: str, grace_s: float) -> None:
        warn(f"{name}: saving once the step is over, in at most {grace_s:g} s; again to end now.")
        if not self.ended.wait(grace_s):
            self.end(Interrupted(OVERDUE.format(self.grace_s)))

    def end(self, error: BaseException) -> None:
        """Raise an error in the main thread; end the process where that is held by a library."""
        self.is_overdue, self.failure = True, error
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        if not self.left.wait(LEAVE_S):
            self.leave(error)

    def leave(self, error: BaseException) -> None:
        """End the process with an error that the main thread does not hear of."""
        is_asked = isinstance(error, KeyboardInterrupt)
        sys.stderr.write(f"error: {'interrupted: ' * is_asked}{error}\n")
        sys.stderr.flush()
        os._exit(130 if is_asked else getattr(error, "exit_code", 4))

    def guard(self, pipe: int) -> None:
        """Leave once the main thread, which a library may hold, has not heard a signal for the
        grace time; the system writes each one into the pipe.
        """
        while os.read(pipe, 1):
            now, limit_s = time.monotonic(), self.grace_s or HELD_S
            while self.heard_at < now - SAME_S and not self.left.wait(0.1):
                held_s = time.monotonic() - now
                is_signal = self.failure is None  # and no error of another thread's
                if is_signal and held_s > SAME_S and (why := self.blocked()):
                    self.leave(Interrupted(why))
                if is_signal and held_s > limit_s:
                    self.leave(Interrupted(f"a library held the main thread for {limit_s:g} s"))
        os.close(pipe)


def _close_terminal() -> None:
    """Write to nobody where the output was a terminal's, which takes nothing any more."""
    with open(os.devnull, "w") as nobody:
        for stream in (1, 2):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(nobody.fileno(), stream)


_listener = _Listener()
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # its signals are its own


def listen() -> None:
    """Handle the signals from now on, unless this process was started to ignore them."""
    if threading.current_thread() is threading.main_thread():
        _listener.pid = os.getpid()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _listener.hear)


@contextmanager
def listening() -> Iterator[None]:
    """Have the signals raise KeyboardInterrupt inside, but where a loop is patient."""
    global _listener
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _listener = _Listener()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    listen()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_listener.guard, args=(read_end,), daemon=True).start()
    try:
        yield
    finally:
        _listener.left.set()
        signal.set_wakeup_fd(wakeup)
        os.close(write_end)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def patiently(grace_s: float) -> Iterator[None]:
    """Let the block ask `is_asked` now and then and end by itself, within `grace_s` seconds."""
    listener = _listener
    listener.grace_s = grace_s
    try:
        yield
    finally:
        listener.ended.set()
        if not listener.is_overdue:
            listener.grace_s = None


@contextmanager
def leavable() -> Iterator[None]:
    """Let a part of such a block be left: raise Left there when it is asked. Signals reach the main
    thread only: another one is not left.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _listener.asked_at is not None:
        raise Left
    _listener.is_leavable = True
    try:
        yield
    except KeyboardInterrupt:  # Ray's waits pass on this class alone
        if _listener.is_overdue:
            raise
        raise Left from None
    finally:
        _listener.is_leavable = False


@contextmanager
def explaining_end(how: Callable[[], str]) -> Iterator[None]:
    """Raise Interrupted for a signal that ends the block, with the text that `how` returns: what
    was saved, and how to go on.
    """
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(how()) from None


def end_run(error: BaseException) -> None:
    """Raise an error in the main thread, or end the process where that does not come to it."""
    threading.Thread(target=_listener.end, args=(error,), daemon=True).start()


def blocked_by(why: Callable[[], str]) -> None:
    """Do not wait for a main thread that does not hear a signal while `why` returns a text."""
    _listener.blocked = why


def leave_behind() -> None:
    """Let the process end without waiting for what still runs in it."""
    _listener.is_overdue = True


def is_overdue() -> bool:
    """Return True once the grace time is over: what still runs is left behind."""
    return _listener.is_overdue


def is_asked() -> bool:
    """Return True once this process was asked to stop."""
    return _listener.asked_at is not None
