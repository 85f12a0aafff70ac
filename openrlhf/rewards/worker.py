"""A process that does nothing but call a user's reward function, so that it can be killed.

Started by worker_process.py as `python -m openrlhf.rewards.worker SOCKET FILE PARENT`. It gets
pickled batches from its parent and answers JSON: what a model wrote may have run in here, and is
not to be unpickled. It ends when its parent does, also in the middle of a call.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.family import TaskLimit
from openrlhf.rewards.user_function import UserFunction

PR_SET_PDEATHSIG = 1
DUMP_SIGNAL = signal.SIGUSR1  # writes the stack of a call that hangs to the log


def main(arguments: Sequence[str]) -> None:
    """Load the function, say so, and answer batches until the parent hangs up."""
    socket, path, parent = arguments
    connection = Connection(int(socket))
    die_with_parent(int(parent))
    own_pid = os.getpid()
    limit = TaskLimit()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    try:
        function = UserFunction(path)
    except ConfigError as error:
        _reply(connection, {"problems": error.problems})
        return
    _reply(connection, {"ready": True})
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            batch = connection.recv()
            try:
                with limit:
                    reply = function.answer(batch).as_dict()
            except RewardError as error:
                reply = {"error": str(error)}
            if os.getpid() != own_pid:  # a copy that the function forked: it has no say
                os._exit(0)
            _reply(connection, reply)


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process with the thread that started it; Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit("the parent process is gone")


def _reply(connection: Connection, reply: dict[str, object]) -> None:
    connection.send_bytes(json.dumps(reply).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
