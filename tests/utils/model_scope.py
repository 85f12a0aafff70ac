"""A hub that answers ModelScope's own library: the files of folders `models/org/name` and
`datasets/org/name`, by HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, urlparse

PREFIX = "/api/v1/"


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, root: Path, *args: object) -> None:
        self.root = root
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        url = urlparse(self.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        kind, owner, name, *rest = [*url.path.removeprefix(PREFIX).split("/"), "", ""]
        folder = self.root / kind / owner / name
        if not folder.is_dir() or not name:
            self._send(404, _json({"Code": 10010205001, "Success": False, "Message": "not found"}))
        elif "FilePath" in asked:
            self._send(200, (folder / asked["FilePath"]).read_bytes())
        else:
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            listed = [
                {
                    "Path": str(path.relative_to(folder)),
                    "Type": "blob",
                    "Size": path.stat().st_size,
                }
                for path in files
            ]
            found = {"Files": listed} if "repo" in rest else {"Name": name}
            self._send(200, _json({"Code": 200, "Success": True, "Data": found}))

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def _json(thing: object) -> bytes:
    return json.dumps(thing).encode()


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Serve a folder for the time of a block; its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, root)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
