"""serve_rm: reward models behind HTTP. POST /get_reward, GET /health, GET /ready.

Who may ask is decided from the headers, before a byte of the body is read. Whatever is refused is a
JSON object {error, field, request_id}; nothing that was sent is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
import signal
import socket
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from openrlhf.config.serving import ServeRewardConfig, ServerLimitsConfig, is_loopback
from openrlhf.errors import ConfigError, RewardError
from openrlhf.models.support import check_here
from openrlhf.serving.served_model import Batcher, RefusedError, ServedModel, load_order
from openrlhf.utils.logging import notice

TOKEN_VARIABLE = "OPENRLHF_REWARD_TOKEN"
MIN_TOKEN_CHARS = 16
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
BACKLOG = 2048
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they are the ones to close
MAX_RESPONSES = 256  # that are kept for clients who ask again
PER_TEXT = ("prompts", "labels", "is_truncated", "ids")  # one value for each text

Content = dict[str, Any]  # of a response
Id = Annotated[str, Field(max_length=256)] | int | float


class RewardRequest(BaseModel):
    """B texts to score; what else is sent is of no use to a reward model."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    query: list[str]  # B
    prompts: list[str] | None = None
    labels: list[Any] | None = None
    is_truncated: list[Any] | None = None
    ids: list[Id | None] | None = None  # B, given back as they came
    model: str | None = None  # None: all that are served


def read_request(body: bytes, limits: ServerLimitsConfig) -> RewardRequest:
    """Return the request in a body; raises RefusedError."""
    try:
        request = RewardRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name, *rest = [*first["loc"], "body"] if not first["loc"] else first["loc"]
        is_syntax = first["type"] == "json_invalid" or name == "body"
        is_bad = is_syntax or (first["type"] == "missing" and name == "query")
        place = f"[{rest[0]}]" if rest and isinstance(rest[0], int) else ""
        field = f"{name}"[:64].encode("utf-8", "backslashreplace").decode() + place
        raise RefusedError(400 if is_bad else 422, first["msg"][:200], field) from error
    if len(request.query) > limits.max_queries:
        count = len(request.query)
        raise RefusedError(413, f"{count} texts; at most {limits.max_queries} are taken", "query")
    for index, text in enumerate(request.query):
        if len(text) > limits.max_chars:
            problem = f"{len(text)} characters; at most {limits.max_chars} are taken"
            raise RefusedError(413, problem, f"query[{index}]")
    for name in PER_TEXT:
        values = getattr(request, name)
        if values is not None and len(values) != len(request.query):
            problem = f"{len(values)} values for {len(request.query)} texts in query"
            raise RefusedError(422, problem, name)
    return request


class RewardService:
    """The models of a server, what waits for them, and the responses that were given."""

    def __init__(self, config: ServeRewardConfig, models: Sequence[ServedModel]) -> None:
        self.models = models
        self.limits = config.limits
        self.num_requests = 0  # under way
        self.num_given_up = 0  # when the server stopped
        thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.batchers = [
            Batcher(
                model,
                thread,
                max_rows=config.batch_size,
                max_tokens=config.limits.max_tokens_per_forward,
            )
            for model in models
        ]
        self._weights = config.reward.model_weights
        self._is_cutting = config.data.overlong_texts != "error"
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self._responses: OrderedDict[tuple[str, bytes], asyncio.Task[Content]] = OrderedDict()

    async def once(self, request_id: str | None, body: bytes) -> Content:
        """Return the response to a body; one that comes again under its id is computed once."""
        if request_id is None:
            return await self.score(body)
        key = request_id, hashlib.sha256(body).digest()
        if key not in self._responses:
            self._responses[key] = asyncio.ensure_future(self.score(body))
            if len(self._responses) > MAX_RESPONSES:
                self._responses.popitem(last=False)
        task = self._responses[key]
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and (task.cancelled() or task.exception() is not None):
                self._responses.pop(key, None)  # it may be tried again

    async def score(self, body: bytes) -> Content:
        """Return the rewards of a request; raise RefusedError."""
        request = read_request(body, self.limits)
        chosen = [k for k, m in enumerate(self.models) if request.model in (None, m.name, m.path)]
        if not chosen:
            served = ", ".join(model.name for model in self.models)
            raise RefusedError(404, f"not served here; served: {served}", "model")
        loop, texts = asyncio.get_running_loop(), request.query
        models = [self.models[k] for k in chosen]
        rows = [await loop.run_in_executor(self._tokenizing, m.tokenize, texts) for m in models]
        cut = [[m.cut(ids) for ids in part] for m, part in zip(models, rows, strict=True)]
        scores = await asyncio.gather(
            *(self.batchers[k].score(part) for k, part in zip(chosen, cut, strict=True))
        )
        is_all = len(chosen) == len(self.models)
        weights = [self._weights[k] if is_all else 1.0 for k in chosen]
        content: Content = {
            "rewards": [
                sum(w * score for w, score in zip(weights, row, strict=True))
                for row in zip(*scores, strict=True)
            ],
            "models": {model.name: model.hash for model in models},
        }
        logs = {m.name: part for m, part in zip(models, scores, strict=True) if len(chosen) > 1}
        if self._is_cutting:
            content["truncated"] = [
                any(len(ids) > m.max_len for m, ids in zip(models, of_text, strict=True))
                for of_text in zip(*rows, strict=True)
            ]
            logs["truncated"] = [float(value) for value in content["truncated"]]
        if logs:
            content["extra_logs"] = logs
        if request.ids is not None:
            content["ids"] = request.ids
        return content


def build_app(service: RewardService, token: str | None) -> FastAPI:
    """Return the application; `token` None lets everybody in."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    limits = service.limits

    @app.post("/get_reward")
    async def get_reward(request: Request) -> Response:
        check_headers(request, limits, token)
        if service.num_requests >= limits.max_requests:
            raise RefusedError(503, f"busy with {service.num_requests} requests", None)
        service.num_requests += 1
        try:
            body = await asyncio.wait_for(read_body(request, limits), limits.receive_timeout_s)
            content = await service.once(request.headers.get("x-request-id"), body)
        except asyncio.TimeoutError as error:
            raise RefusedError(408, "the request did not arrive in time", "body") from error
        except asyncio.CancelledError:  # by the end of the server
            service.num_given_up += 1
            raise
        finally:
            service.num_requests -= 1
        return reply(request, 200, content)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/ready")
    async def ready() -> Response:
        is_ready = all(batcher.is_working for batcher in service.batchers)
        queued = sum(batcher.num_waiting for batcher in service.batchers)
        reason = None if is_ready else "the model fails"
        waiting = {"queued": queued, "requests": service.num_requests}
        state = {"ready": is_ready, "reason": reason, **waiting}
        return JSONResponse(state, status_code=200 if is_ready else 503)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        field = getattr(error, "field", None)
        return reply(request, error.status_code, {"error": str(error.detail), "field": field})

    return app


def check_headers(request: Request, limits: ServerLimitsConfig, token: str | None) -> None:
    """Refuse a request by what its headers say."""
    headers = request.headers
    given = headers.get("authorization", "").encode("latin-1")
    if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise RefusedError(401, "the token is missing or wrong", "authorization")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError(415, "must be application/json", "content-type")
    length = headers.get("content-length", "")
    if length.isdigit():
        check_size(int(length), limits)
    if not REQUEST_ID.fullmatch(headers.get("x-request-id", "none")):
        raise RefusedError(400, "1 to 128 letters, digits or . : _ -", "x-request-id")


async def read_body(request: Request, limits: ServerLimitsConfig) -> bytes:
    """Return the whole body; raises RefusedError when it is too large."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        check_size(len(body), limits)
    return bytes(body)


def check_size(num_bytes: int, limits: ServerLimitsConfig) -> None:
    """Refuse a body that is too large."""
    if num_bytes > limits.max_body_bytes:
        problem = f"{num_bytes} bytes; at most {limits.max_body_bytes} are taken"
        raise RefusedError(413, problem, "body")


def reply(request: Request, status: int, content: Content) -> Response:
    """Return a response with the id of its request."""
    given = request.headers.get("x-request-id", "")
    request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    headers = {"x-request-id": request_id}
    if status == 503:
        headers["retry-after"] = "1"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({**content, "request_id": request_id}, status, headers)


def serve_rewards(config: ServeRewardConfig) -> None:
    """Serve until a signal; raises ConfigError before anything listens that should not."""
    token = read_token(config)
    check_here(config.ds, trains=False)
    models = load_order(config)
    listener = listen(config.host, config.port)
    address = address_of(listener)
    notice(f"listening on {address}/get_reward; loading the weights")
    for model in models:
        model.load()
        notice(model.facts)
    service = RewardService(config, models)
    server = uvicorn.Server(uvicorn_config(build_app(service, token), config.limits))
    notice(f"ready: {address}/get_reward")
    # uvicorn stops in order at either signal, and raises it again when it has ended.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if service.num_given_up:
        raise RewardError(
            f"Requests were left unanswered {config.limits.stop_timeout_s:g} s after the stop. "
            "Raise --limits.stop_timeout_s to wait longer."
        )
    num_rows = sum(batcher.num_rows for batcher in service.batchers)
    num_forwards = sum(batcher.num_forwards for batcher in service.batchers)
    notice(f"stopped: {num_rows} texts scored in {num_forwards} forward passes")


def uvicorn_config(app: FastAPI, limits: ServerLimitsConfig) -> uvicorn.Config:
    """Return HTTP without an access log, trusted proxies or a word about the software."""
    return uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        access_log=False,
        log_config=None,
        log_level="critical",
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        limit_concurrency=limits.max_connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(limits.stop_timeout_s)),
    )


def read_token(config: ServeRewardConfig) -> str | None:
    """Return the token clients must send; None where only this machine connects and none is set."""
    source, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE, "")
    if config.token_file is not None:
        source = f"--token_file {config.token_file}"
        token = Path(config.token_file).expanduser().read_text(errors="replace").strip()
    elif not token and is_loopback(config.host):
        return None
    elif not token:
        raise ConfigError(
            f"--host {config.host} lets other machines connect, and no token is set. Put one into "
            f"--token_file FILE or {TOKEN_VARIABLE}, or type --host 127.0.0.1."
        )
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{source} must hold one line of at least {MIN_TOKEN_CHARS} plain characters: "
            f"{len(token)} found. Make a token with `openssl rand -hex 32`."
        )
    return token


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections; raises ConfigError when the address cannot be had."""
    is_v6 = ":" in host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_v6
        )
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened on: {error.strerror or error}. "
            "Type --port 0 for a free port, or an address of this machine."
        ) from error


def address_of(listener: socket.socket) -> str:
    """Return `http://127.0.0.1:5000`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
