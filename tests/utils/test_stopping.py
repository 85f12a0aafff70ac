"""Ctrl-C and SIGTERM: noted by a loop that ends by itself, raised everywhere else."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from openrlhf.errors import EngineError
from openrlhf.utils import stopping


@pytest.fixture(autouse=True)
def none_is_ignored() -> Iterator[None]:
    """Under nohup SIGHUP is."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def ask(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_outside_of_a_loop_a_signal_raises_at_once(number):
    with stopping.listening(), pytest.raises(KeyboardInterrupt):
        ask(number)


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_a_patient_loop_notes_a_signal_and_a_launchers_copy_of_it(number, capfd):
    with stopping.listening(), stopping.patiently(60):
        assert not stopping.is_asked()
        ask(number)
        ask(signal.SIGTERM)
        assert stopping.is_asked()
        while "saving once the step is over" not in capfd.readouterr().err:
            time.sleep(0.01)


def test_a_process_forked_off_ends_without_a_word(capfd):
    with stopping.listening():
        if not (child := os.fork()):
            ask()
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM
    assert capfd.readouterr() == ("", "")


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    monkeypatch.setattr(stopping, "SAME_S", 0.0)
    with stopping.listening(), stopping.patiently(60), pytest.raises(KeyboardInterrupt):
        ask()
        assert stopping.is_asked()
        ask()


def test_a_part_that_may_be_left_is_left_for_what_was_asked_before_too():
    with stopping.listening(), stopping.patiently(60):
        with pytest.raises(KeyboardInterrupt), stopping.leavable():
            ask()
        with pytest.raises(KeyboardInterrupt), stopping.leavable():
            pass


def test_the_end_of_the_grace_time_says_what_was_not_saved():
    overdue = pytest.raises(KeyboardInterrupt, match=r"did not end in 0\.1 s \(--grace_s\)")
    with overdue, stopping.listening(), stopping.patiently(0.1):
        ask()
        time.sleep(10)


def test_handlers_of_before_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with stopping.listening():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


HELD = """
import ctypes
from openrlhf.utils import stopping

with stopping.listening(), stopping.patiently(1.0):
    mutex = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    print("held", flush=True)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)  # no signal ends it
"""


def test_a_library_that_holds_the_main_thread_does_not_keep_the_process():
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", HELD]
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said == "error: interrupted: a library held the main thread for 1 s\n"


def test_a_library_that_waits_for_what_is_stopped_is_not_waited_for():
    blocked = HELD.replace(
        "patiently(1.0):", "patiently(60):\n    stopping.blocked_by(lambda: 'it')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", blocked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        time.sleep(0.5)  # until it is
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (130, "error: interrupted: it\n")


def test_another_thread_ends_a_run_by_an_error_of_the_main_one():
    with stopping.listening(), pytest.raises(EngineError, match="gone"):
        stopping.end_run(EngineError("gone"))
        time.sleep(10)


ENDED = """
import threading
from openrlhf.errors import EngineError

stopping.LEAVE_S = 2
threading.Timer(0.2, stopping.end_run, [EngineError("gone")]).start()
"""


def test_what_ends_a_run_is_said_where_a_library_holds_the_main_thread():
    head, rest = HELD.split("\nwith stopping")
    held = f"{head}{ENDED}with stopping{rest}"
    pipe = subprocess.PIPE
    ended = subprocess.run([sys.executable, "-c", held], stdout=pipe, stderr=pipe, timeout=60)
    assert (ended.returncode, ended.stderr) == (EngineError.exit_code, b"error: gone\n")
