"""What a worker sends is JSON behind its token, or nothing that counts."""

import asyncio
import pickle
import socket
import time
from pathlib import Path

import pytest

from openrlhf.errors import ConfigError
from openrlhf.utils.worker_process import WorkerProcess


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def send(connection: socket.socket, token: str, path: str, sent: bytes) -> None:
    """A worker that knows the token and sends something else."""
    connection.sendall(f"\n{token}".encode() + sent)
    time.sleep(60)


def test_a_worker_that_sends_no_json_is_ended_and_nothing_is_unpickled(tmp_path):
    made = tmp_path / "made"
    packed, nested = pickle.dumps(Payload(made)), b"[" * 100_000
    messages = (packed, b'["result", 0', b'["error", 0, {"name": []}]', b"7", nested)
    for sent in [*(b"%d\n%s" % (len(data), data) for data in messages), b"999999999\n", b"x\n"]:

        async def start(sent: bytes = sent) -> None:
            await WorkerProcess.start(send, "my.py", sent)

        with pytest.raises(ConfigError, match=r"^my.py: the file sent half a message"):
            asyncio.run(asyncio.wait_for(start(), 50))
    assert not made.exists()
