"""serve_rm from start to end: check, listen, load, score, stop.

The model has the main thread and the event loop a thread of its own, so that the server says it is
alive while weights are loaded, and Ctrl-C ends loading at once. Once the model answers, SIGINT and
SIGTERM stop the server in order: nothing new is taken, what is in flight is answered.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from typing_extensions import Self

from openrlhf.config.reward_server import ServeRewardConfig, ServerLimitsConfig
from openrlhf.errors import ConfigError, RewardError
from openrlhf.models.kernels import check_here
from openrlhf.trainer.reward_server.app import build_app
from openrlhf.trainer.reward_server.connection import KEEP_ALIVE_S, guarded_protocol
from openrlhf.trainer.reward_server.model import load_order
from openrlhf.trainer.reward_server.service import RewardService
from openrlhf.utils.logging import notice

TOKEN_VARIABLE = "OPENRLHF_REWARD_TOKEN"
MIN_TOKEN_CHARS = 16
BACKLOG = 2048
START_TIMEOUT_S = 30.0
POLL_S = 0.01


class HttpServer:
    """uvicorn in a thread, between `with` and its end; `on_end` is called when it has ended."""

    def __init__(
        self,
        app: FastAPI,
        listener: socket.socket,
        limits: ServerLimitsConfig,
        on_end: Callable[[], None],
    ) -> None:
        self.address = address_of(listener)
        self.num_signals = 0
        self._listener = listener
        self._on_end = on_end
        self._stop_timeout_s = limits.stop_timeout_s
        self._stopped_at_s: float | None = None
        self._server = uvicorn.Server(uvicorn_config(app, limits))
        self._thread = threading.Thread(target=self._serve, name="reward-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RewardError(f"The server at {self.address} did not start.")
            time.sleep(POLL_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # nobody scores any more: there is nothing to wait for
            self._server.force_exit = True
        self.stop()
        self._thread.join(self._stop_timeout_s + START_TIMEOUT_S if kind is None else 1.0)

    def stop(self) -> None:
        """Take nothing new, answer what is in flight, and end; returns at once."""
        if self._stopped_at_s is None:
            self._stopped_at_s = time.monotonic()
        self._server.should_exit = True

    def check_ended_in_order(self) -> None:
        """Raise RewardError unless the server was stopped and answered everything."""
        if self._stopped_at_s is None:
            raise RewardError(f"The server at {self.address} ended by itself.")
        if time.monotonic() - self._stopped_at_s > self._stop_timeout_s:
            raise RewardError(
                f"Requests were left unanswered {self._stop_timeout_s:g} s after the stop. "
                "Raise --limits.stop_timeout_s to wait longer."
            )

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._on_end()


def serve_rewards(config: ServeRewardConfig) -> None:
    """Serve until a signal; raises ConfigError before anything listens that should not."""
    token = read_token(config)
    check_here(config.ds)
    models = load_order(config)
    service = RewardService(config, models)
    listener = listen(config.host, config.port)
    app = build_app(service, config.limits, token)
    with HttpServer(app, listener, config.limits, on_end=service.close) as server:
        notice(f"listening on {server.address}/get_reward; loading the weights")
        service.load()
        for model in models:
            notice(model.facts)
        notice(f"ready: {server.address}/get_reward")
        with stopped_by_signals(server):
            service.run()
        server.check_ended_in_order()
    batcher = service.batcher
    notice(f"stopped: {batcher.num_rows} texts scored in {batcher.num_forwards} forward passes")


@contextmanager
def stopped_by_signals(server: HttpServer) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops the server in order, the second one at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        server.num_signals += 1
        server.stop()
        if server.num_signals > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def uvicorn_config(app: FastAPI, limits: ServerLimitsConfig) -> uvicorn.Config:
    """HTTP without access log, websockets, trusted proxies or a word about the software."""
    return uvicorn.Config(
        app,
        http=guarded_protocol(limits),
        loop="asyncio",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="error",
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(limits.stop_timeout_s)),
    )


def read_token(config: ServeRewardConfig) -> str | None:
    """The token clients must send; None where only this machine can connect and none is set."""
    source = f"--token_file {config.token_file}" if config.token_file else TOKEN_VARIABLE
    token = token_in(config.token_file) if config.token_file else os.environ.get(TOKEN_VARIABLE)
    if not token and config.token_file is None:
        if config.is_loopback:
            return None
        raise ConfigError(
            f"--host {config.host} lets other machines connect, and no token is set. Put one into "
            f"--token_file FILE or {TOKEN_VARIABLE}, or type --host 127.0.0.1."
        )
    if not token or len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{source} must hold one line of at least {MIN_TOKEN_CHARS} plain characters: "
            f"{len(token or '')} found. Make a token with `openssl rand -hex 32`."
        )
    return token


def token_in(path: str) -> str:
    """The text of a token file without the white space around it."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token_file {path} cannot be read: {error}. Give a text file with the token."
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; raises ConfigError when the address cannot be had."""
    listener = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, number, _, address = min(found, key=lambda item: item[0] != socket.AF_INET)
        listener = socket.socket(family, kind, number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened on: {error.strerror or error}. "
            "Type --port 0 for a free port, or an address of this machine."
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    """`http://127.0.0.1:5000`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
