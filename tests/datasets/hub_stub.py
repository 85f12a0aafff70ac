"""A hub of data sets on a loopback port: the requests that the Hugging Face client makes, answered
from a dictionary.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath

COMMIT = "a" * 40
Repositories = dict[str, dict[str, bytes]]  # "org/name" -> path -> content


@contextmanager
def serving(repositories: Repositories) -> Iterator[str]:
    """The address of a hub with these data sets, as HF_ENDPOINT takes it."""

    class Handler(_Hub):
        found = repositories

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Hub(BaseHTTPRequestHandler):
    found: Repositories

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/").removeprefix("api/")
        kind, *parts = path.split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        if not kind:
            self._answer(b"")  # is anybody there
        elif kind != "datasets" or name not in self.found:
            self._answer(b"{}", status=404, X_Error_Code="RepoNotFound")
        elif rest[:1] == ["resolve"]:
            self._file(self.found[name], "/".join(rest[2:]))
        elif rest[:1] == ["tree"]:
            self._tree(self.found[name], "/".join(rest[2:]))
        else:
            files = [{"rfilename": path} for path in self.found[name]]
            self._json({"id": name, "sha": COMMIT, "tags": [], "siblings": files})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b"{}", status=404)

    def _file(self, files: dict[str, bytes], path: str) -> None:
        if path in files:
            etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
            self._answer(files[path], ETag=etag, X_Repo_Commit=COMMIT)
        else:
            missing = {"X_Error_Code": "EntryNotFound", "X_Repo_Commit": COMMIT}
            self._answer(b"", status=404, **missing)

    def _tree(self, files: dict[str, bytes], folder: str) -> None:
        """What stands in a folder, one level deep unless all is asked for."""
        prefix = f"{folder}/" if folder else ""
        is_deep = "recursive=true" in self.path.lower()
        inside = [path for path in files if path.startswith(prefix)]
        folders = {str(parent) for path in inside for parent in PurePosixPath(path).parents}
        entries: list[dict[str, object]] = [
            {"type": "directory", "path": path, "oid": COMMIT}
            for path in sorted(folders - {".", folder})
        ]
        entries += [
            {"type": "file", "path": path, "oid": COMMIT, "size": len(files[path])}
            for path in inside
        ]
        depth = prefix.count("/")
        self._json([e for e in entries if is_deep or str(e["path"]).count("/") == depth])

    def _json(self, value: object) -> None:
        self._answer(json.dumps(value).encode(), Content_Type="application/json")

    def _answer(self, body: bytes, *, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
