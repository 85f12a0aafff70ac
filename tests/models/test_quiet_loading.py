"""Downloads of the hub's files have bars of ours."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants
from huggingface_hub.file_download import http_get

from openrlhf.models.quiet_loading import download_bar_class
from tests.bars import Recorder, until

SIZE = 3 * 2**20
DISPLAY = Recorder()


class SlowFile(BaseHTTPRequestHandler):
    """Sends the last third of a file once a bar has been seen."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(SIZE))
        self.end_headers()
        self.wfile.write(bytes(SIZE - 2**20))
        until(DISPLAY.appeared.is_set)
        self.wfile.write(bytes(2**20))

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), SlowFile)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/model-00001-of-00002.safetensors"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_that_is_downloaded_moves_a_bar_in_mebibytes(url, show_bars_on, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    show_bars_on(DISPLAY)
    name = "model-00001-of-00002.safetensors"
    file = io.BytesIO()
    http_get(url, file, displayed_filename=name, tqdm_class=download_bar_class())
    assert len(file.getvalue()) == SIZE
    assert {text for text, _, _ in DISPLAY.shown} == {f"downloading {name} (MiB)"}
    assert not DISPLAY.open
    assert capsys.readouterr() == ("", "")
