"""`openrlhf serve-rm`: reward models behind HTTP. POST /get_reward, GET /health, GET /ready.

Who may ask is decided from the headers, before a byte of the body is read; who does not send them
in time, or holds many connections, is hung up on. Whatever is refused is a JSON object {error,
field, request_id}; nothing that was sent is logged.

A text is tokenised as it is: special tokens spelled in it are special tokens, since it went through
a chat template where it was made; nothing is put at its end. Its prompt, where it is sent, and the
rest are encoded apart, as in training. The score is read at the last token.
"""

import asyncio
import contextlib
import hashlib
import hmac
import math
import os
import signal
import socket
import uuid
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import torch
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException as AnyHTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol, h11

from openrlhf.config.serving import ServeRewardConfig, ServerLimitsConfig, is_loopback
from openrlhf.errors import ConfigError, RewardError, first_line
from openrlhf.models.loading import (
    check_value_model,
    default_device_type,
    load_config,
    load_sequence_model,
)
from openrlhf.models.support import check_here, num_positions
from openrlhf.models.value_head import RewardModel, reward_mean_and_std
from openrlhf.rewards.remote import TOKEN_VARIABLE, checked_token
from openrlhf.utils.console import format_count, notice
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tensors import dtype_name, fingerprint
from openrlhf.utils.tokenizer import TextEncoder, load_tokenizer

KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they are the ones to close
MAX_RESPONSES = 256  # that are kept for clients who ask again
PER_TEXT = ("prompts", "labels", "is_truncated", "ids")  # one value for each text
SHORTEST = ([0],)  # every vocabulary has a token 0

Content = dict[str, Any]  # of a response
Id = Annotated[str, Field(max_length=256)] | int | float
Row = Sequence[int]  # token ids of one text
Score = float | tuple[int, str]  # or the HTTP status and the reason of a failure


def refused(status: int, problem: str, field: str | None = None) -> HTTPException:
    """Return the error of a request that is refused; `field` is where it lies."""
    return HTTPException(status, {"error": problem, "field": field})


class RewardRequest(BaseModel):
    """B texts to score; what else is sent is of no use to a reward model."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    query: list[str]  # B
    prompts: list[str] | None = None  # B, with which texts begin
    labels: list[Any] | None = None
    is_truncated: list[Any] | None = None
    ids: list[Id | None] | None = None  # B, given back as they came
    model: str | None = None  # None: all that are served


def read_request(body: bytes, limits: ServerLimitsConfig) -> RewardRequest:
    """Return the request in a body, or refuse it."""
    try:
        request = RewardRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name, *rest = first["loc"] or ("body",)
        is_bad = name == "body" or (first["type"] == "missing" and name == "query")
        place = f"[{rest[0]}]" if rest and isinstance(rest[0], int) else ""
        field = f"{name}"[:64].encode("utf-8", "backslashreplace").decode() + place
        raise refused(400 if is_bad else 422, first["msg"][:200], field) from error
    count = len(request.query)
    if count > limits.max_queries:
        raise refused(413, f"{count} texts; at most {limits.max_queries} are taken", "query")
    for index, text in enumerate(request.query):
        if len(text) > limits.max_chars:
            problem = f"{len(text)} characters; at most {limits.max_chars} are taken"
            raise refused(413, problem, f"query[{index}]")
    for name in PER_TEXT:
        values = getattr(request, name)
        if values is not None and len(values) != count:
            raise refused(422, f"{len(values)} values for {count} texts in query", name)
    return request


class ServedModel:
    """One reward model: checked when made, with weights after `load`."""

    def __init__(self, config: ServeRewardConfig, path: str, name: str) -> None:
        """Read what is small, config and tokenizer; raise ConfigError."""
        trust = config.trust_remote_code
        self.config, self.path, self.name = config, path, name
        model_config = load_config(path, trust_remote_code=trust)
        check_value_model(model_config, path)
        if config.reward.normalize_enable:
            reward_mean_and_std(model_config)
        self.max_len = min(config.data.max_len, num_positions(model_config) or config.data.max_len)
        self.tokenizer = load_tokenizer(path, trust_remote_code=trust)
        self._encoder = TextEncoder(self.tokenizer, allow_special_tokens=True)

    def load(self) -> None:
        """Put the weights on this machine's device, and say what was loaded."""
        hf_model = load_sequence_model(self.path, self.config, allow_fresh_head=False)
        model = RewardModel(hf_model, normalize_reward=self.config.reward.normalize_enable)
        model.requires_grad_(requires_grad=False).eval()
        self.module = model if self.config.ds.load_in_4bit else model.to(default_device_type())
        digest = hashlib.sha256(repr(model.scale).encode())
        for name, weights in self.module.named_parameters():
            digest.update(f"{name} {weights.dtype} {fingerprint(weights)}".encode())
        self.hash = digest.hexdigest()[:16]  # of weights, their types, and the scale of the scores
        count = sum(weights.numel() for weights in self.module.parameters())
        notice(
            f"{self.path}: {format_count(count)} parameters, {dtype_name(weights.dtype)} on "
            f"{weights.device}, texts up to {self.max_len} tokens, hash {self.hash}"
        )

    def tokenize(
        self, texts: Sequence[str], prompts: Sequence[str]
    ) -> tuple[list[Row], list[bool]]:
        """Return the token ids of texts that begin with these prompts, and which of them were cut;
        refuse a text without tokens, and one that is too long unless it may be cut.
        """
        rows = [self._ids(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]
        policy, limit = self.config.data.overlong_texts, self.max_len
        for index, ids in enumerate(rows):
            if not texts[index] or not ids:
                raise refused(422, "the text is empty", f"query[{index}]")
            if policy == "error" and len(ids) > limit:
                problem = (
                    f"{len(ids)} tokens, and --max_len leaves room for {limit}. Send a shorter "
                    "text, or start the server with --overlong_texts truncate_left"
                )
                raise refused(422, problem, f"query[{index}]")
        cut = self._encoder.last_ids if policy == "truncate_left" else _first_ids
        return [cut(ids, limit) for ids in rows], [len(ids) > limit for ids in rows]

    def _ids(self, text: str, prompt: str) -> list[int]:
        """Return the token ids of a text; if it begins with its prompt, of each part by itself."""
        start = len(prompt) if text.startswith(prompt) else 0
        parts = [self._encoder.plain(part) for part in (text[:start], text[start:])]
        prompt_ids, rest_ids = self._encoder.encode_segments(parts)
        return self._encoder.with_leading_ids([*prompt_ids, *rest_ids])

    def score(self, rows: Sequence[Row]) -> list[float]:
        """Return the scores of rows, in one forward pass."""
        ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
        batch = PackedBatch.from_sequences(ids, [torch.zeros(len(row)) for row in rows])
        device = next(self.module.parameters()).device
        try:
            with torch.inference_mode():
                scores: list[float] = self.module(batch.to(device)).scores.tolist()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # half of the rows may fit, in memory that is not in pieces
            raise
        return scores


def _first_ids(ids: list[int], limit: int) -> list[int]:
    return ids[:limit]


class Batcher:
    """The queue between requests and one model, on one event loop; forwards run in `thread`.

    Rows that arrive while a forward runs join the next one, in the order in which they came.
    """

    def __init__(
        self, model: ServedModel, thread: Executor, *, max_rows: int | None, max_tokens: int
    ) -> None:
        self.model = model
        self.num_forwards = 0
        self.num_rows = 0  # scored so far
        self.is_working = True  # the last forward did not show a broken model
        self._thread = thread
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._waiting: deque[tuple[Row, asyncio.Future[Score]]] = deque()
        self._running: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Return the number of rows that no forward has taken yet."""
        return sum(not future.done() for _, future in self._waiting)

    async def score(self, rows: Sequence[Row]) -> list[float]:
        """Return the score of every row, or refuse the first that has none; cancelling it frees its
        place.
        """
        futures = [asyncio.get_running_loop().create_future() for _ in rows]
        self._waiting += zip(rows, futures, strict=True)
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())
        scores = await asyncio.gather(*futures)
        for index, score in enumerate(scores):
            if isinstance(score, tuple):
                raise refused(score[0], score[1], f"query[{index}]")
        return scores

    async def _run(self) -> None:
        """Score until nothing waits."""
        loop = asyncio.get_running_loop()
        while taken := self._next_rows():
            rows = [row for row, _ in taken]
            scores = await loop.run_in_executor(self._thread, self._scores, rows)
            self.num_rows += len(rows)
            for (_, future), score in zip(taken, scores, strict=True):
                if not future.done():  # or else given up
                    future.set_result(score)

    def _next_rows(self) -> list[tuple[Row, asyncio.Future[Score]]]:
        """Take rows until the forward is full."""
        taken: list[tuple[Row, asyncio.Future[Score]]] = []
        num_tokens = 0
        while self._waiting and len(taken) != self._max_rows:
            row, future = self._waiting[0]
            if not future.done():  # or else given up
                num_tokens += len(row)
                if taken and num_tokens > self._max_tokens:
                    break
                taken.append((row, future))
            self._waiting.popleft()
        return taken

    def _scores(self, rows: Sequence[Row]) -> list[Score]:
        """Return a score or a failure for each row: what fails together is tried in halves."""
        self.num_forwards += 1
        try:
            scores = self.model.score(rows)
        except (RuntimeError, MemoryError, IndexError) as error:  # torch's: memory, kernels, ids
            if len(rows) > 1:
                middle = len(rows) // 2
                return self._scores(rows[:middle]) + self._scores(rows[middle:])
            if rows is SHORTEST:
                self.is_working = False
            else:
                self._scores(SHORTEST)  # after some errors a GPU does nothing
            return [(503, f"the model failed: {first_line(error)[:200]}")]
        self.is_working = True
        return [s if math.isfinite(s) else (500, f"non_finite: the score is {s}") for s in scores]


class RewardService:
    """The models of a server, what waits for them, and the responses that were given."""

    def __init__(self, config: ServeRewardConfig, models: Sequence[ServedModel]) -> None:
        self.limits = config.limits
        self.num_requests = 0  # under way
        self.num_given_up = 0  # when the server stopped
        thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        most = config.limits.max_tokens_per_forward
        self.batchers = [
            Batcher(model, thread, max_rows=config.batch_size, max_tokens=most) for model in models
        ]
        self._weights = config.reward.weights or (1.0,) * len(models)
        self._is_cutting = config.data.overlong_texts != "error"
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self._responses: OrderedDict[tuple[str, bytes], asyncio.Task[Content]] = OrderedDict()

    async def once(self, request_id: str | None, body: bytes) -> Content:
        """Return the response to a body; one that comes again under its id is computed once, unless
        it failed.
        """
        if request_id is None:
            return await self.score(body)
        key = request_id, hashlib.sha256(body).digest()
        task = self._responses.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._responses[key] = asyncio.ensure_future(self.score(body))
            if len(self._responses) > MAX_RESPONSES:
                self._responses.popitem(last=False)
        return await asyncio.shield(task)

    async def score(self, body: bytes) -> Content:
        """Return the rewards of a request, or refuse it."""
        request = read_request(body, self.limits)
        is_wanted = [request.model in (None, b.model.name, b.model.path) for b in self.batchers]
        chosen = [b for b, is_chosen in zip(self.batchers, is_wanted, strict=True) if is_chosen]
        if not chosen:
            served = ", ".join(batcher.model.name for batcher in self.batchers)
            raise refused(404, f"not served here; served: {served}", "model")
        loop, models = asyncio.get_running_loop(), [batcher.model for batcher in chosen]
        asked = request.query, request.prompts or [""] * len(request.query)
        texts = [
            await loop.run_in_executor(self._tokenizing, model.tokenize, *asked) for model in models
        ]
        scores = await asyncio.gather(
            *(batcher.score(rows) for batcher, (rows, _) in zip(chosen, texts, strict=True))
        )
        weights = self._weights if all(is_wanted) else [1.0] * len(chosen)
        content: Content = {
            "rewards": [
                sum(w * score for w, score in zip(weights, row, strict=True))
                for row in zip(*scores, strict=True)
            ],
            "models": {model.name: model.hash for model in models},
        }
        logs = {m.name: part for m, part in zip(models, scores, strict=True) if len(chosen) > 1}
        if self._is_cutting:
            of_models = [is_cut for _, is_cut in texts]
            content["truncated"] = [any(of_text) for of_text in zip(*of_models, strict=True)]
            logs["truncated"] = [float(value) for value in content["truncated"]]
        if logs:
            content["extra_logs"] = logs
        if request.ids is not None:
            content["ids"] = request.ids
        return content


def build_app(service: RewardService, token: str | None) -> FastAPI:
    """Return the application; `token` None lets everybody in."""
    # A page of another host, which a browser was sent to by name, must not ask without a token.
    checks = [Depends(check_host)] if token is None else []
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=checks)
    limits = service.limits

    @app.post("/get_reward")
    async def get_reward(request: Request) -> Response:
        check_headers(request, token)
        if service.num_requests >= limits.max_requests:
            raise refused(503, f"busy with {service.num_requests} requests")
        service.num_requests += 1
        try:
            body = await asyncio.wait_for(read_body(request, limits), limits.receive_timeout_s)
            content = await service.once(request.headers.get("x-request-id"), body)
        except TimeoutError as error:
            raise refused(408, "the request did not arrive in time", "body") from error
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

    @app.exception_handler(AnyHTTPException)
    async def refuse(request: Request, error: AnyHTTPException) -> Response:
        detail: Any = error.detail  # of starlette's own a text
        content = detail if isinstance(detail, dict) else {"error": detail, "field": None}
        return reply(request, error.status_code, content)

    return app


async def check_host(request: Request) -> None:
    """Refuse a request to a name that is not this machine's own."""
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    if not is_loopback(host):
        problem = f"{host[:64]!r} is not 127.0.0.1, localhost or ::1. Use one, or set a token"
        raise refused(400, problem, "host")


def check_headers(request: Request, token: str | None) -> None:
    """Refuse a request without the token or of another type than JSON."""
    given = request.headers.get("authorization", "").encode("latin-1")
    if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise refused(401, "the token is missing or wrong", "authorization")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise refused(415, "must be application/json", "content-type")


async def read_body(request: Request, limits: ServerLimitsConfig) -> bytes:
    """Return the whole body, or refuse one that is too large, at once if it says so."""
    declared = request.headers.get("content-length", "")
    num_bytes, body = int(declared) if declared.isdigit() else 0, bytearray()
    if num_bytes <= limits.max_body_bytes:
        async for piece in request.stream():
            body += piece
            if (num_bytes := len(body)) > limits.max_body_bytes:
                break
    if num_bytes > limits.max_body_bytes:
        problem = f"{num_bytes} bytes; at most {limits.max_body_bytes} are taken"
        raise refused(413, problem, "body")
    return bytes(body)


def reply(request: Request, status: int, content: Content) -> Response:
    """Return a response with the id of its request."""
    request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
    headers = {"x-request-id": request_id}
    if status == 503:
        headers["retry-after"] = "1"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({**content, "request_id": request_id}, status, headers)


def serve_rewards(config: ServeRewardConfig) -> None:
    """Serve until a signal; raise ConfigError before anything listens that should not."""
    token = read_token(config)
    check_here(config.ds, trains=False)
    models = read_models(config)
    listener = listen(config.host, config.port)
    address = address_of(listener)
    notice(f"listening on {address}/get_reward; loading the weights")
    for model in models:
        model.load()
    service = RewardService(config, models)
    server = uvicorn.Server(uvicorn_config(build_app(service, token), config.limits))
    # uvicorn stops in order at either signal, and raises it again when it has ended.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        notice(f"ready: {address}/get_reward")
        server.run(sockets=[listener])
    if service.num_given_up:
        raise RewardError(
            f"Requests were left unanswered {config.limits.stop_timeout_s:g} s after the stop. "
            "Raise --limits.stop_timeout_s to wait longer."
        )
    num_rows = sum(batcher.num_rows for batcher in service.batchers)
    num_forwards = sum(batcher.num_forwards for batcher in service.batchers)
    notice(f"stopped: {num_rows} texts scored in {num_forwards} forward passes")


def read_models(config: ServeRewardConfig) -> list[ServedModel]:
    """Return every model of the command line, without weights; raise ConfigError."""
    named = zip(config.reward.model_paths, config.reward.model_names, strict=True)
    return [ServedModel(config, path, name) for path, name in named]


class GuardedProtocol(H11Protocol):
    """HTTP whose headers must come in time, for a bounded number of connections of an address."""

    def __init__(self, *args: Any, limits: ServerLimitsConfig, **named: Any) -> None:
        super().__init__(*args, **named)
        self.limits = limits
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_header()
        address = _address_of(self)
        num_of_address = sum(_address_of(other) == address for other in self.connections)
        if num_of_address > self.limits.max_connections_per_address:
            transport.write(b"HTTP/1.1 503 \r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
            transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE:
            self._expect_header()  # or the rest of a request that is answered already
        else:
            self._header_is_there()

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_is_there()
        super().connection_lost(exc)

    def _expect_header(self) -> None:
        if self._deadline is None:
            limit_s = self.limits.receive_timeout_s
            self._deadline = self.loop.call_later(limit_s, self.transport.abort)

    def _header_is_there(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _address_of(connection: Any) -> str:
    return connection.client[0] if connection.client else ""


def uvicorn_config(app: FastAPI, limits: ServerLimitsConfig) -> uvicorn.Config:
    """Return HTTP without an access log, trusted proxies or a word about the software."""
    return uvicorn.Config(
        app,
        http=partial(GuardedProtocol, limits=limits),  # type: ignore[arg-type]
        access_log=False,
        log_config=None,
        log_level="critical",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=limits.max_connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(limits.stop_timeout_s)),
    )


def read_token(config: ServeRewardConfig) -> str | None:
    """Return the token clients must send; None where only this machine connects and none is set."""
    token, file = (
        checked_token(os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE),
        config.token_file,
    )
    if file is not None:
        text = Path(file).expanduser().read_text(errors="replace")
        token = checked_token(text, f"--token_file {file}")
        if not token:
            raise ConfigError(f"--token_file {file} is empty. Write a token into it.")
    if not token and not is_loopback(config.host):
        raise ConfigError(
            f"--host {config.host} lets other machines connect, and no token is set. Put one into "
            f"--token_file FILE or {TOKEN_VARIABLE}, or type --host 127.0.0.1."
        )
    return token or None


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections; raises ConfigError when the address cannot be had."""
    is_v6 = ":" in host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=is_v6)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened on: {error.strerror or error}. "
            "Type --port 0 for a free port, or an address of this machine."
        ) from error


def address_of(listener: socket.socket) -> str:
    """Return `http://127.0.0.1:5000`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
