"""A loopback server that speaks the OpenAI API for the policy: /v1/chat/completions, /v1/models,
/tokenize, /health.

The API key says which episode a request belongs to. It has a thread and a loop of its own, so that
clients that block theirs are answered all the same.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    MutableMapping,
)
from typing import Any
from weakref import WeakValueDictionary

from openrlhf.engines.base import OnTokens
from openrlhf.errors import EngineError
from openrlhf.trainer.ppo_utils.agent_chat import Dialogue, read_json
from openrlhf.trainer.ppo_utils.agent_engine import Episode, TextCodec, TurnTaker
from openrlhf.trainer.ppo_utils.agent_loop import LoopThread
from openrlhf.trainer.ppo_utils.agent_sampling import named_values
from openrlhf.trainer.ppo_utils.agent_trace import EpisodeOverError
from openrlhf.trainer.ppo_utils.openai_requests import (
    MODEL_NAME,
    APIError,
    ChatAnswer,
    ChatRequest,
    read_chat_request,
    without_run_sampling,
)
from openrlhf.trainer.ppo_utils.openai_stream import ChunkStream, TokenWatcher
from openrlhf.trainer.ppo_utils.openai_stream import event as event_of
from openrlhf.utils.agent import AgentError, ContextFullError, OpenAISession

MAX_BODY_BYTES = 32 * 2**20
START_TIMEOUT_S = 30.0
EVENTS = b"text/event-stream; charset=utf-8"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Body = Mapping[str, Any]


class ChatSession:
    """One episode as its client sees it."""

    def __init__(
        self, episode: Episode, taker: TurnTaker, codec: TextCodec, base: Mapping[str, Any]
    ) -> None:
        self.episode = episode
        self.taker = taker
        self.codec = codec
        self.base = base  # sampling of the episode, under what a request says
        self.ignores_client_sampling = False
        self.dialogue = Dialogue(codec)

    def read(self, body: Body) -> ChatRequest:
        """The request of a body; raises APIError."""
        request = read_chat_request(body)
        if request.model != MODEL_NAME:
            message = f"model is {request.model!r}. Use {MODEL_NAME!r}, as session.model says."
            raise APIError(400, message, "model", "model_not_found")
        return without_run_sampling(request) if self.ignores_client_sampling else request

    async def chat(self, request: ChatRequest, on_tokens: OnTokens | None = None) -> ChatAnswer:
        """Sample the next turn; raises APIError, AgentError or EngineError."""
        prepared = self.dialogue.prepare(request.messages, request.tools)
        params = {**self.base, **request.sampling}
        request_id, completion = await self.taker.take(
            self.episode, prepared.token_ids, params, self.codec, on_tokens
        )
        reply = self.dialogue.note(prepared, completion, reads_tool_calls=request.reads_tool_calls)
        return ChatAnswer.now(
            f"chatcmpl-{request_id}", request, reply, completion, len(prepared.token_ids)
        )

    async def events(self, request: ChatRequest) -> AsyncIterator[str]:
        """The same as server-sent events, while the engine samples."""
        stream, watcher = ChunkStream(request, self.codec), TokenWatcher()
        turn = asyncio.ensure_future(self.chat(request, watcher))
        try:
            while not turn.done():
                look = asyncio.ensure_future(watcher.grown.get())
                await asyncio.wait({turn, look}, return_when=asyncio.FIRST_COMPLETED)
                if not look.done():
                    look.cancel()
                elif not turn.done():
                    for event in stream.more(look.result()):
                        yield event
            for event in stream.end(turn.result()):
                yield event
        finally:
            turn.cancel()

    def tokenize(self, body: Body) -> dict[str, Any]:
        """Ids of a text ("prompt") or of messages, as the policy would read them."""
        if "messages" in body:
            ids = self.dialogue.prepare(body["messages"], body.get("tools")).token_ids
        elif isinstance(body.get("prompt"), str):
            ids = self.codec.encode_prompt(body["prompt"], self.episode.request)
        else:
            raise APIError(400, "give messages, or prompt as a string", "prompt")
        max_length = self.taker.limits.max_length
        return {"count": len(ids), "max_model_len": max_length, "tokens": ids}


class OpenAIServer:
    """Serves the sessions of one runner's episodes."""

    def __init__(self, taker: TurnTaker, codec: TextCodec) -> None:
        import uvicorn  # noqa: PLC0415 - started only where an agent asks for a server

        self._taker = taker
        self._codec = codec
        self._sessions: WeakValueDictionary[str, ChatSession] = WeakValueDictionary()
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        config = uvicorn.Config(
            self, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = LoopThread("openai-server")
        self._thread.run(self._start(), START_TIMEOUT_S)

    def open_session(
        self, episode: Episode, sampling_params: object, *, ignores_client_sampling: bool
    ) -> OpenAISession:
        """A key for an episode; it is valid as long as the episode runs."""
        base = {k: v for k, v in named_values(sampling_params).items() if v is not None}
        session = ChatSession(episode, self._taker, self._codec, base)
        session.ignores_client_sampling = ignores_client_sampling
        key = f"sk-{secrets.token_hex(16)}"
        episode.sessions.append(session)
        self._sessions[key] = session
        return OpenAISession(self.base_url, key, MODEL_NAME, episode.request.columns)

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._thread.close()
        self._socket.close()

    async def _start(self) -> None:
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if serving.done():
                raise EngineError(f"the agents' server did not start: {serving.exception()}")
            await asyncio.sleep(0.01)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request."""
        try:
            await self._answer(scope, receive, send)
        except APIError as error:
            await _send_json(send, error.status, error.body())
        except EpisodeOverError as error:
            await _send_json(send, 409, APIError(409, str(error), code="episode_over").body())
        except ContextFullError as error:
            code = "context_length_exceeded"
            await _send_json(send, 400, APIError(400, str(error), "messages", code).body())
        except AgentError as error:
            await _send_json(send, 400, APIError(400, str(error)).body())
        except EngineError as error:
            await _send_json(send, 500, APIError(500, str(error)).body())

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = (scope["method"], scope["path"].removeprefix("/v1"))
        if route == ("GET", "/health"):
            await _send_json(send, 200, {"status": "ok"})
            return
        session = self._session_of(scope)
        if route == ("GET", "/models"):
            await _send_json(send, 200, self._models())
        elif route == ("POST", "/tokenize"):
            await _send_json(send, 200, session.tokenize(await _read_json(receive)))
        elif route == ("POST", "/chat/completions"):
            request = session.read(await _read_json(receive))
            answering = self._stream if request.is_streamed else self._answer_whole
            await _while_connected(receive, answering(session, request, send))
        else:
            raise APIError(404, f"no such address: {scope['method']} {scope['path']}")

    async def _answer_whole(self, session: ChatSession, request: ChatRequest, send: Send) -> None:
        answer = await session.chat(request)
        await _send_json(send, 200, answer.as_whole(self._codec))

    async def _stream(self, session: ChatSession, request: ChatRequest, send: Send) -> None:
        """Send events; what fails before the first of them has a status, later it is an event."""
        has_begun = False
        try:
            async for event in session.events(request):
                if not has_begun:
                    await _send_head(send, 200, EVENTS)
                    has_begun = True
                await _send_part(send, event.encode(), is_last=False)
        except (APIError, AgentError, EngineError) as error:
            if not has_begun:
                raise
            told = error if isinstance(error, APIError) else APIError(500, str(error))
            await _send_part(send, event_of(told.body()).encode(), is_last=False)
        await _send_part(send, b"", is_last=True)

    def _session_of(self, scope: Scope) -> ChatSession:
        headers = dict(scope["headers"])
        key = headers.get(b"authorization", b"").decode("latin-1").removeprefix("Bearer ")
        session = self._sessions.get(key)
        if session is None:
            raise APIError(401, "the API key belongs to no running episode", code="invalid_api_key")
        return session

    def _models(self) -> dict[str, Any]:
        length = self._taker.limits.max_length
        model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "openrlhf"}
        return {"object": "list", "data": [{**model, "max_model_len": length}]}


async def _read_json(receive: Receive) -> Body:
    """The body as an object; APIError 400 or 413."""
    chunks, size, is_more = [], 0, True
    while is_more:
        message = await receive()
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise APIError(413, f"the body is over {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
        is_more = bool(message.get("more_body"))
    try:
        body = read_json(b"".join(chunks).decode())
    except ValueError as error:
        raise APIError(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise APIError(400, "the body is no JSON object")
    return body


async def _send_json(send: Send, status: int, body: Mapping[str, Any]) -> None:
    data = json.dumps(body, ensure_ascii=False).encode()
    await _send(send, status, b"application/json", data)


async def _send(send: Send, status: int, kind: bytes, data: bytes) -> None:
    await _send_head(send, status, kind, (b"content-length", str(len(data)).encode()))
    await _send_part(send, data, is_last=True)


async def _send_head(send: Send, status: int, kind: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", kind), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_part(send: Send, data: bytes, *, is_last: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not is_last})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do work for a client; it is cancelled when the client leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        leaving.cancel()
        working.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
