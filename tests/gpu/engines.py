"""An engine in a process of its own, as it is beside a trainer, and where tests of devices run."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from openrlhf.engines.vllm_engine import VLLMEngine

# The same test on a GPU, and as far as a CPU can show it.
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.slow),
]


def serve(connection: Connection, settings: dict[str, Any], devices: str) -> None:
    """Answer calls of an engine until shutdown was one of them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = devices  # before anything asks for CUDA
    engine = VLLMEngine(settings)
    method = ""
    while method != "shutdown":
        method, args, options = connection.recv()
        try:
            connection.send((getattr(engine, method)(*args, **options), None))
        except (RuntimeError, TypeError, ValueError) as error:
            connection.send((None, error))


class RemoteEngine:
    """An engine in a process of its own."""

    def __init__(self, settings: dict[str, Any], devices: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, settings, devices), daemon=True)
        self.process.start()

    def call(self, method: Callable[..., Any], *args: object) -> Any:
        return getattr(self, method.__name__)(*args)

    def __getattr__(self, method: str) -> Any:
        def call(*args: object, **options: object) -> Any:
            self.connection.send((method, args, options))
            assert self.connection.poll(240), f"{method} was not answered"
            answer, error = self.connection.recv()
            if error is not None:
                raise error
            return answer

        return call


def endpoint() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()
