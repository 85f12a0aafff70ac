"""What is said of a process that took another one with it."""

import subprocess
import sys
import time

from openrlhf.trainer.ray import end_after


def test_a_named_process_that_died_first_is_named_and_the_others_are_ended() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    first, named, later, other = (subprocess.Popen(sleep) for _ in range(4))
    words = [end_after.__file__, str(first.pid), f"{named.pid}=Ray's raylet", f"{other.pid}="]
    words += [f"{later.pid}=Ray's GCS"]
    with subprocess.Popen([sys.executable, "-I", *words], stderr=subprocess.PIPE) as program:
        time.sleep(0.5)
        for killed in (named, later):
            killed.kill()
            time.sleep(0.5)
        first.kill()
        first.wait()
        assert program.stderr is not None
        assert program.stderr.read() == f"error: Ray's raylet (pid {named.pid}) died\n".encode()
    assert other.wait(timeout=10) == -9
