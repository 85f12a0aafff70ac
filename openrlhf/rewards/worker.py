"""A process that does nothing but call a user's reward function, so that it can be killed.

Started by worker_process.py as `python -m openrlhf.rewards.worker ADDRESS TOKEN FILE PARENT`. While
the user's code runs no connection is open: a descriptor that it writes to, closes or hands to its
children is never the parent's. It gets pickled batches from its parent and answers JSON: what a
model wrote may have run in here, and is not to be unpickled. It ends when its parent does.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from socket import AF_UNIX, SHUT_WR, socket

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.answers import RewardBatch
from openrlhf.rewards.user_function import UserFunction

PR_SET_PDEATHSIG = 1
DUMP_SIGNAL = signal.SIGUSR1  # writes the stack of a call that hangs to the log


def main(arguments: Sequence[str]) -> None:
    """Load the function, say so, and answer batches until the parent hangs up."""
    address, token, path, parent = arguments
    die_with_parent(int(parent))
    own_pid = os.getpid()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    try:
        function = UserFunction(path)
    except ConfigError as error:
        _exchange(address, token, {"problems": error.problems})
        return
    reply: dict[str, object] = {"ready": True}
    while (received := _exchange(address, token, reply)) is not None:
        token, batch = received
        try:
            reply = function.answer(batch).as_dict()
        except RewardError as error:
            reply = {"error": str(error)}
        if os.getpid() != own_pid:  # a copy that the function forked: it has no say
            os._exit(0)


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process with the thread that started it; Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit("the parent process is gone")


def _exchange(address: str, token: str, reply: dict[str, object]) -> tuple[str, RewardBatch] | None:
    """Hand a reply in and return the next batch with its token; None when the parent is gone."""
    with socket(AF_UNIX) as connection:
        connection.settimeout(None)  # whatever default the user's code has set
        connection.connect(address)
        connection.sendall(f"{token}\n{json.dumps(reply)}".encode())
        connection.shutdown(SHUT_WR)
        with connection.makefile("rb") as file:
            received = file.read()
    # From the parent, whose folder holds the address.
    return pickle.loads(received) if received else None


if __name__ == "__main__":
    main(sys.argv[1:])
