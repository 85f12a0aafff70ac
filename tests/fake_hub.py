"""A Hugging Face hub of this process: it takes repositories and commits, and keeps what it got."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_of_the_test"


class FakeHub(ThreadingHTTPServer):
    """`files` of each repository by path; `is_private` of each that was made."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.is_private: dict[str, bool] = {}
        self.refuses_commits = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """What leads the client here."""
        return {"HF_ENDPOINT": self.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:  # is the hub there?
        self.respond({})

    def do_GET(self) -> None:  # the files of a repository
        name = self.path.removeprefix("/api/models/").partition("/tree/")[0]
        files = self.server.files[name].items()
        self.respond(
            [{"type": "file", "path": f, "size": len(data), "oid": "1"} for f, data in files]
        )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.respond({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            self.create(json.loads(body))
        elif self.path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            files = [{"path": f["path"], "uploadMode": "regular"} for f in asked]
            self.respond({"files": [f | {"shouldIgnore": False} for f in files]})
        elif "/commit/" not in self.path:  # is the header of the model card right?
            self.respond({"errors": [], "warnings": []})
        elif self.server.refuses_commits:
            self.respond({"error": "The disk of the hub is full."}, 507)
        else:
            self.commit(body)

    def create(self, asked: dict) -> None:
        name = f"{asked.get('organization', 'me')}/{asked['name']}"
        url = {"url": f"{self.server.address}/{name}"}
        if name in self.server.files:
            self.respond(url | {"error": "You already created this repo"}, 409)
            return
        self.server.files[name] = {}
        self.server.is_private[name] = asked.get("private", asked.get("visibility") == "private")
        self.respond(url)

    def commit(self, body: bytes) -> None:
        name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.files[name][line["value"]["path"]] = content
            elif line["key"] == "deletedFile":
                del self.server.files[name][line["value"]["path"]]
        self.respond({"commitUrl": f"{self.server.address}/{name}/commit/1", "commitOid": "1"})

    def respond(self, content: dict | list, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if "error" in content:
            self.send_header("X-Error-Message", content["error"])
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()
