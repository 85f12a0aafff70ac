"""A hub that does not answer costs one wait and one line; what is in the cache still works."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from openrlhf.errors import ConfigError
from openrlhf.utils.hub import UNREACHABLE, looking_up, why_unreachable


class NotHere(BaseHTTPRequestHandler):
    """Answers every question with a no."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Puts the hub at a port of this machine; what it decides is taken back afterwards."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv(UNREACHABLE, "")
    monkeypatch.delenv(UNREACHABLE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    why_unreachable.cache_clear()
    yield lambda port: monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    why_unreachable.cache_clear()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def answering_port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), NotHere)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_hub_that_refuses_is_one_line_that_says_what_to_type(at: Callable) -> None:
    port = closed_port()
    at(port)
    with pytest.raises(ConfigError) as caught, looking_up("model", "org/name"):
        raise OSError("couldn't find them in the cached files")
    (line,) = caught.value.problems
    assert line.startswith("model org/name is neither here nor in the hub's cache, and the ")
    assert f"the hub at http://127.0.0.1:{port} does not answer (" in line
    assert "refused" in line
    for words in ("a local copy", "HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE=1"):
        assert words in line


def test_an_endpoint_that_is_no_address_is_named(
    at: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "hub.example")
    with pytest.raises(ConfigError) as caught, looking_up("model", "org/name"):
        raise OSError("not cached")
    assert "the hub at hub.example does not answer (" in str(caught.value)


def test_a_hub_that_says_nothing_is_waited_for_once(at: Callable, silent_port: int) -> None:
    at(silent_port)
    start = time.monotonic()
    for _ in range(3):
        waited = pytest.raises(ConfigError, match="nothing within 1 s; HF_HUB_ETAG_TIMEOUT gives")
        with waited, looking_up("data set", "org/rows"):
            raise ConnectionError("no")
    assert 0.9 < time.monotonic() - start < 3


def test_the_cache_is_used_from_then_on_here_and_in_what_is_started(
    at: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets.config

    at(closed_port())
    was_offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = False
    try:
        with looking_up("model", "org/in-the-cache"):
            assert constants.HF_HUB_OFFLINE
            assert datasets.config.HF_HUB_OFFLINE
            assert os.environ["HF_HUB_OFFLINE"] == "1"
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline
    assert "does not answer" in capsys.readouterr().err
    # A process that is started later does not ask, and knows why.
    why_unreachable.cache_clear()
    assert why_unreachable() == os.environ[UNREACHABLE]


def test_a_hub_that_answers_is_believed(at: Callable, answering_port: int) -> None:
    at(answering_port)
    with pytest.raises(OSError, match="the hub's own words"), looking_up("model", "org/name"):
        raise OSError("the hub's own words")
    assert not constants.HF_HUB_OFFLINE
    assert os.environ["HF_HUB_OFFLINE"] == "0"


@pytest.mark.parametrize("is_offline", [True, False])
def test_neither_who_is_offline_nor_a_folder_waits(
    at: Callable,
    silent_port: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    is_offline: bool,
) -> None:
    at(silent_port)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    start = time.monotonic()
    if is_offline:
        expected = pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set")
    else:
        expected = pytest.raises(OSError, match="torn")
    with expected, looking_up("model", "org/m" if is_offline else str(tmp_path)):
        raise OSError("torn")
    assert time.monotonic() - start < 0.5
