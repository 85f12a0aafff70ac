"""Real HTTP servers for the tests: each answers as its test says and keeps what it was sent."""

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[Any, ...]  # status, body, and headers if there are any
Behaviour = Callable[["RewardServer", dict[str, Any]], Answer | None]


def rewards(values: list[Any], **more: Any) -> Answer:
    return 200, json.dumps({"rewards": values, **more}).encode()


def lengths(server: "RewardServer", body: dict[str, Any]) -> Answer:
    """The length of every query, as a good server would."""
    return rewards([float(len(query)) for query in body["query"]])


@dataclass
class RewardServer:
    """A server on a free loopback port; a behaviour that answers None hangs up."""

    behaviour: Behaviour = lengths
    port: int = 0  # 0: a free one
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_now: int = 0
    num_most: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "RewardServer":
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.requests.append(body)
                    server.headers.append(dict(self.headers))
                    server.num_now += 1
                    server.num_most = max(server.num_most, server.num_now)
                answer = server.behaviour(server, body)
                with server.lock:
                    server.num_now -= 1
                if answer is None:
                    self.close_connection = True
                    return
                status, content, *headers = answer
                named = headers[0] if headers else {}
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                for header in named.items():
                    self.send_header(*header)
                self.end_headers()
                for byte in content if "Drip" in named else ():  # one after the other
                    server.stopping.wait(float(named["Drip"]))
                    self.wfile.write(bytes([byte]))
                self.wfile.write(b"" if "Drip" in named else content)

            def log_message(self, *args: object) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *args: object) -> None: ...

        self.http = Server(("127.0.0.1", self.port), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopping.set()
        self.http.shutdown()
        self.http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/get_reward"

    @property
    def queries(self) -> list[str]:
        return [query for body in self.requests for query in body["query"]]


def started(count: int, stack: ExitStack) -> list[RewardServer]:
    return [stack.enter_context(RewardServer()) for _ in range(count)]


def free_url() -> str:
    """A loopback URL that nobody answers."""
    with RewardServer() as server:
        return server.url
