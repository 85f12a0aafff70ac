"""A reward server in this process: real sockets, real uvicorn, in a thread."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn

from openrlhf.commands.serve_rm import (
    RewardService,
    address_of,
    build_app,
    listen,
    read_models,
    uvicorn_config,
)
from openrlhf.config.serving import ServeRewardConfig
from tests.helpers.processes import wait_until

JSON = {"content-type": "application/json"}


class Served:
    """A running server and a client of it."""

    def __init__(self, service: RewardService, server: uvicorn.Server, url: str) -> None:
        self.service = service
        self.server = server
        self.url = url
        self.place = ("127.0.0.1", int(url.rpartition(":")[2]))
        self.client = httpx.Client(base_url=url, timeout=30, trust_env=False)

    def ask(self, body: object, **headers: str) -> httpx.Response:
        """POST /get_reward; anything but bytes is made JSON."""
        is_ready = isinstance(body, bytes | Iterator)
        content = body if is_ready else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post("/get_reward", content=content, headers={**JSON, **names})

    def rewards(self, *texts: str) -> list[float]:
        """Return the rewards of texts."""
        answer = self.ask({"query": list(texts)})
        assert answer.status_code == 200, answer.text
        return answer.json()["rewards"]


@contextmanager
def serving(path: object, *, token: str | None = None, **config: object) -> Iterator[Served]:
    """A server of the model at `path` until the end of the block."""
    reward = {"model_name_or_path": str(path), **config.pop("reward", {})}
    settings = ServeRewardConfig.model_validate({"port": 0, "reward": reward, **config})
    models = read_models(settings)
    for model in models:
        model.load()
    service = RewardService(settings, models)
    listener = listen(settings.host, 0)
    server = uvicorn.Server(uvicorn_config(build_app(service, token), settings.limits))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_until(lambda: server.started)
    served = Served(service, server, address_of(listener))
    with served.client:
        yield served
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@contextmanager
def unharmed(server: Served) -> Iterator[Served]:
    """The server; after the block it answers a good request and waits for none."""
    yield server
    assert len(server.rewards("good")) == 1
    state = {"ready": True, "reason": None, "queued": 0, "requests": 0}
    assert server.client.get("/ready").json() == state
