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

SIZE = 3 * 2**20


class ZeroFile(BaseHTTPRequestHandler):
    """Serves zeros."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(SIZE))
        self.end_headers()
        self.wfile.write(bytes(SIZE))

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), ZeroFile)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/model-00001-of-00002.safetensors"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_that_is_downloaded_moves_a_bar_in_mebibytes(url, terminal, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    name = "model-00001-of-00002.safetensors"
    file = io.BytesIO()
    http_get(url, file, displayed_filename=name, tqdm_class=download_bar_class())
    assert len(file.getvalue()) == SIZE
    assert f"downloading {name} (MiB)" in terminal.getvalue() and "3/3" in terminal.getvalue()
    assert capsys.readouterr() == ("", "")
