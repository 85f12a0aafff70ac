"""A reward server in this process: real sockets, real uvicorn, the model in a thread."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil

from openrlhf.config.reward_server import ServeRewardConfig
from openrlhf.trainer.reward_server.app import build_app
from openrlhf.trainer.reward_server.model import load_order
from openrlhf.trainer.reward_server.server import HttpServer, listen
from openrlhf.trainer.reward_server.service import RewardService

JSON = {"content-type": "application/json"}
HEAD = b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
GOOD = b'{"query": ["good"]}'
MAX_GROWTH_BYTES = 150 * 2**20  # what the client sends is in it too: both are this process


class Served:
    """A running server and a client of it."""

    def __init__(
        self, service: RewardService, server: HttpServer, worker: threading.Thread
    ) -> None:
        self.service = service
        self.server = server
        self.worker = worker  # scores until the server has ended
        self.url = server.address
        self.port = int(server.address.rpartition(":")[2])
        self.client = httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def ask(self, body: object, **headers: str) -> httpx.Response:
        """POST /get_reward; anything but bytes is made JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post("/get_reward", content=content, headers={**JSON, **names})

    def rewards(self, *texts: str) -> list[float]:
        """The rewards of texts."""
        answer = self.ask({"query": list(texts)})
        assert answer.status_code == 200, answer.text
        return answer.json()["rewards"]

    def raw(self, data: bytes, timeout_s: float = 10) -> bytes:
        """What comes back for these bytes until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s) as connection:
            connection.sendall(data)
            pieces = []
            try:
                while piece := connection.recv(65536):
                    pieces.append(piece)
            except ConnectionResetError:
                pass
            return b"".join(pieces)


@contextmanager
def unharmed(server: Served) -> Iterator[Served]:
    """The server; after the block it answers a good request, waits for none, and has not grown by
    much.
    """
    process = psutil.Process()
    before = process.memory_info().rss
    yield server
    assert len(server.rewards("good")) == 1
    assert server.client.get("/ready").json() == {
        "ready": True,
        "reason": None,
        "queued": 0,
        "requests": 0,
    }
    assert process.memory_info().rss - before < MAX_GROWTH_BYTES


@contextmanager
def serving(
    path: object, *, token: str | None = None, load: bool = True, **config: object
) -> Iterator[Served]:
    """A server of the model at `path` until the end of the block."""
    reward = {"model_name_or_path": str(path), **config.pop("reward", {})}
    settings = ServeRewardConfig.model_validate({"port": 0, "reward": reward, **config})
    service = RewardService(settings, load_order(settings))
    app = build_app(service, settings.limits, token)
    listener = listen(settings.host, 0)
    with HttpServer(app, listener, settings.limits, on_end=service.close) as server:
        worker = threading.Thread(target=service.run)
        if load:
            service.load()
        worker.start()
        served = Served(service, server, worker)
        with served.client:
            yield served
    worker.join(10)
    assert not worker.is_alive()
