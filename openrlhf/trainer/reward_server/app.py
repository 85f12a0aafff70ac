"""The HTTP side of serve_rm: POST /get_reward, GET /health, GET /ready.

Who may ask and how much is decided from the headers, before a byte of the body is read. Whatever is
refused is a JSON object {error, field, request_id}; nothing that was sent is logged.
"""

from __future__ import annotations

import asyncio
import hmac
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from openrlhf.config.reward_server import ServerLimitsConfig
from openrlhf.trainer.reward_server.answers import Answer, Answers, unless_gone
from openrlhf.trainer.reward_server.batcher import ScoringError
from openrlhf.trainer.reward_server.request import RefusedError
from openrlhf.trainer.reward_server.service import RewardService

REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
CLIENT_IS_GONE = 499  # nobody reads it
BODIES_HELD = 16  # largest requests that may be in memory together


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


class Gate:
    """How many requests and how many bytes are let in."""

    def __init__(self, limits: ServerLimitsConfig) -> None:
        self.limits = limits
        self.num_requests = 0
        self.num_bytes = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """A place for one request; raises RefusedError when there is none."""
        if self.num_requests >= self.limits.max_requests:
            raise RefusedError(503, f"busy with {self.num_requests} requests", None)
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body of a request, held until the request is answered; raises RefusedError."""
        limit, held = self.limits.max_body_bytes, 0
        pieces: list[bytes] = []
        try:
            more = True
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                pieces.append(message.get("body", b""))
                held += len(pieces[-1])
                self.num_bytes += len(pieces[-1])
                check_size(held, limit)
                if self.num_bytes > BODIES_HELD * limit:
                    raise RefusedError(503, "busy with large requests", None)
                more = message.get("more_body", False)
            yield b"".join(pieces)
        finally:
            self.num_bytes -= held


class Door:
    """What the headers of a request must say."""

    def __init__(self, limits: ServerLimitsConfig, token: str | None) -> None:
        self._limits = limits
        self._expected = None if token is None else f"Bearer {token}".encode()

    def check(self, request: Request) -> str | None:
        """The request's id, if it has one; raises RefusedError."""
        headers = request.headers
        given = headers.get("authorization", "").encode("latin-1")
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            raise RefusedError(401, "the token is missing or wrong", "authorization")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RefusedError(415, "must be application/json", "content-type")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise RefusedError(415, "compressed requests are not taken", "content-encoding")
        length = headers.get("content-length")
        if length is not None and length.isdigit():
            check_size(int(length), self._limits.max_body_bytes)
        request_id = headers.get("x-request-id")
        if request_id is not None and not REQUEST_ID.fullmatch(request_id):
            raise RefusedError(400, "1 to 128 letters, digits or . : _ -", "x-request-id")
        return request_id


def check_size(num_bytes: int, limit: int) -> None:
    """Refuse a body that is too large."""
    if num_bytes > limit:
        raise RefusedError(413, f"{num_bytes} bytes; at most {limit} are taken", "body")


def build_app(service: RewardService, limits: ServerLimitsConfig, token: str | None) -> FastAPI:
    """The application; `token` None lets everybody in."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    gate, door, answers = Gate(limits), Door(limits, token), Answers()

    @app.post("/get_reward")
    async def get_reward(request: Request) -> Response:
        request_id = door.check(request)
        request.state.request_id = request_id or fresh_id()
        service.check_loaded()
        with gate.request():
            async with gate.body(request) as body:
                compute = partial(service.answer, body)
                work = answers.get(request_id, body, compute)
                answer = await unless_gone(work, wait_until_gone(request))
        if answer is None:
            raise ClientGone
        return reply(request, 200, answer)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/ready")
    async def ready() -> Response:
        state = {**service.state(), "requests": gate.num_requests}
        return JSONResponse(state, status_code=200 if state["ready"] else 503)

    add_refusals(app)
    return app


def add_refusals(app: FastAPI) -> None:
    """What is said when a request is not answered."""

    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> Response:
        return reply(request, error.status, {"error": error.error, "field": error.field})

    @app.exception_handler(ScoringError)
    async def failed(request: Request, error: ScoringError) -> Response:
        status = 500 if error.is_non_finite else 503
        field = f"query[{error.index}]"
        return reply(request, status, {"error": error.error, "field": field})

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_IS_GONE)

    @app.exception_handler(HTTPException)
    async def no_such_place(request: Request, error: HTTPException) -> Response:
        return reply(request, error.status_code, {"error": str(error.detail), "field": None})


def reply(request: Request, status: int, content: Answer) -> Response:
    """An answer with the id of its request."""
    request_id = getattr(request.state, "request_id", None) or fresh_id()
    headers = {"x-request-id": request_id}
    if status == 503:
        headers["retry-after"] = "1"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({**content, "request_id": request_id}, status, headers)


def fresh_id() -> str:
    """An id for a request that came without; it names the request to people and is no secret."""
    return f"{random.getrandbits(128):032x}"


async def wait_until_gone(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        await asyncio.sleep(0)
