"""A process that does nothing but compare mathematical answers, in its main thread.

Started by math_process.py as `python -m openrlhf.rewards.math_helper SOCKET`. It ends when its
caller hangs up, and the kernel ends it where a comparison cannot be interrupted.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from openrlhf.rewards.math_grader import math_equal

MEMORY_BYTES = 4 * 1024**3
CPU_S = 60  # computing time of a comparison: more than its caller waits


def main(arguments: Sequence[str]) -> None:
    """Say that everything is loaded, and compare until the caller hangs up."""
    [socket] = arguments
    connection = Connection(int(socket))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_AS, MEMORY_BYTES)
    with suppress(EOFError, ConnectionError):
        connection.send_bytes(b"true")
        while True:
            answer, truth = json.loads(connection.recv_bytes())
            times = os.times()
            _lower(resource.RLIMIT_CPU, int(times.user + times.system) + CPU_S)
            is_equal = math_equal(answer, truth)
            connection.send_bytes(json.dumps(is_equal).encode())


def _lower(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main(sys.argv[1:])
