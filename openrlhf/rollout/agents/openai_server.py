"""A loopback server that speaks the OpenAI API for the policy: /v1/chat/completions, /v1/models,
/v1/tokenize, /health.

The API key says which episode a request belongs to. The server has a thread and a loop of its own,
so that clients that block theirs are answered all the same.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

import uvicorn
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openrlhf.engines.base import Completion
from openrlhf.errors import EngineError
from openrlhf.rollout.agents.chat import Dialogue
from openrlhf.rollout.agents.engine import FIXED, TextCodec, sample_turn
from openrlhf.rollout.agents.episode import Episode
from openrlhf.utils.agent import AgentError, OpenAISession

MODEL_NAME = "policy"
# Codes of the OpenAI API for failures of an episode.
CODES = {"context_full": "context_length_exceeded", "episode_over": "episode_over"}
Result = TypeVar("Result")


def refusal(status: int, message: str, **details: str | None) -> HTTPException:
    """Return the response to a request that is refused, as the OpenAI API writes it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": None, **details}
    return HTTPException(status, error)


class ChatRequest(BaseModel):
    """The body of a request; sampling settings are among the extra fields."""

    model_config = ConfigDict(extra="allow")
    messages: list[Any] = Field(default_factory=list)
    model: str = MODEL_NAME
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = "auto"
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    prompt: str | None = None  # of /v1/tokenize, instead of messages
    logprobs: bool | None = False
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the policy may call; None without any."""
        return None if self.tool_choice == "none" else self.tools or None


class ChatSession:
    """One episode as its client sees it."""

    def __init__(self, episode: Episode, codec: TextCodec, base: Mapping[str, Any]) -> None:
        self.episode = episode
        self.codec = codec
        self.base = base  # sampling of the episode, under what a request says
        self.ignores_client_sampling = False
        self.dialogue = Dialogue(codec)

    async def chat(self, body: bytes) -> tuple[ChatRequest, dict[str, Any]]:
        """Sample the next turn and return its response; raises HTTPException and AgentError."""
        request = parsed(body)
        extra = request.model_extra or {}
        if request.model != MODEL_NAME:
            message = f"model is {request.model!r}. Use {MODEL_NAME!r}, as session.model says."
            raise refusal(400, message, param="model", code="model_not_found")
        sampling = {name: value for name, value in extra.items() if value is not None}
        if self.ignores_client_sampling:
            sampling = {k: v for k, v in sampling.items() if k not in FIXED}
        limit = request.max_completion_tokens or request.max_tokens
        params = {**self.base, **sampling, **({"max_tokens": limit} if limit else {})}
        turn = self.dialogue.prepare(request.messages, request.shown_tools)
        num_prompt_tokens = len(turn.token_ids)
        completion = await sample_turn(self.episode, turn.token_ids, params, self.codec)
        reads_tool_calls = request.shown_tools is not None
        message = self.dialogue.note(turn, completion, reads_tool_calls=reads_tool_calls)
        is_call = "tool_calls" in message and completion.finish_reason == "stop"
        choice = {
            "index": 0,
            "message": {**message, "refusal": None},
            "logprobs": self._logprobs(completion) if request.logprobs else None,
            "finish_reason": "tool_calls" if is_call else completion.finish_reason,
        }
        num_new = len(completion.token_ids)
        return request, {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL_NAME,
            "choices": [choice],
            "usage": {
                "prompt_tokens": num_prompt_tokens,
                "completion_tokens": num_new,
                "total_tokens": num_prompt_tokens + num_new,
            },
        }

    def _logprobs(self, completion: Completion) -> dict[str, Any]:
        content = []
        for token_id, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            text = self.codec.decode([token_id])
            entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
            content.append({**entry, "top_logprobs": []})
        return {"content": content, "refusal": None}

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """Return the ids of a text ("prompt") or of messages, as the policy would read them."""
        request = parsed(body)
        if request.prompt is None:
            ids = self.dialogue.prepare(request.messages, request.shown_tools).token_ids
        else:
            ids = self.codec.encode_prompt(request.prompt, self.episode)
        max_length = self.episode.setup.max_length
        return {"count": len(ids), "max_model_len": max_length, "tokens": ids}


def parsed(body: bytes) -> ChatRequest:
    """Return a request; refuse bad JSON (deep nesting, lone surrogates) and fields.

    Chat messages may be of any form here: the dialogue checks them.
    """
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise refusal(400, f"{name}: {first['msg']}".lstrip(": "), param=name) from error


def events_of(request: ChatRequest, response: dict[str, Any]) -> str:
    """Return a response as the server-sent events of a streamed one."""
    head = {**response, "object": "chat.completion.chunk", "choices": []}
    usage = head.pop("usage")
    (choice,) = response["choices"]
    delta = {key: value for key, value in choice["message"].items() if key != "refusal"}
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": k, **call} for k, call in enumerate(calls)]
    said = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    bodies = [{**head, "choices": [said]}, {**head, "choices": [end]}]
    if request.stream_options and request.stream_options.get("include_usage"):
        bodies.append({**head, "usage": usage})
    lines = [json.dumps(body, ensure_ascii=False) for body in bodies]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])


class OpenAIServer:
    """Serves the sessions of one worker's episodes."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._sessions: WeakValueDictionary[str, ChatSession] = WeakValueDictionary()
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)  # clients may connect before the thread serves
        self.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        config = uvicorn.Config(self._app(), log_config=None, access_log=False, lifespan="off")
        serve = uvicorn.Server(config).run
        threading.Thread(target=serve, args=([listening],), name="openai", daemon=True).start()

    def open_session(
        self, episode: Episode, params: Mapping[str, Any], *, ignores_client_sampling: bool
    ) -> OpenAISession:
        """Return address and key for an episode, valid as long as it runs."""
        session = ChatSession(episode, self._codec, params)
        session.ignores_client_sampling = ignores_client_sampling
        key = f"sk-{secrets.token_hex(16)}"
        episode.sessions.append(session)
        self._sessions[key] = session
        return OpenAISession(self.base_url, key, MODEL_NAME, episode.request.columns)

    def _app(self) -> FastAPI:
        app, router = FastAPI(openapi_url=None), APIRouter(prefix="/v1")

        @router.get("/health")
        async def health() -> dict[str, str]:
            return {"status": "ok"}

        @router.get("/models")
        async def models(request: Request) -> dict[str, Any]:
            length = self._session_of(request).episode.setup.max_length
            model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "openrlhf"}
            return {"object": "list", "data": [{**model, "max_model_len": length}]}

        @router.post("/tokenize")
        async def tokenize(request: Request) -> dict[str, Any]:
            return self._session_of(request).tokenize(await request.body())

        @router.post("/chat/completions")
        async def chat(request: Request) -> Response:
            session = self._session_of(request)
            turn = session.chat(await request.body())
            asked, response = await while_connected(request, turn)
            if asked.stream:
                return Response(events_of(asked, response), media_type="text/event-stream")
            return JSONResponse(response)

        app.include_router(router)
        for kind in (HTTPException, AgentError, EngineError):
            app.add_exception_handler(kind, error_response)
        return app

    def _session_of(self, request: Request) -> ChatSession:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        session = self._sessions.get(key)
        if session is None:
            message = "the API key belongs to no running episode"
            raise refusal(401, message, code="invalid_api_key")
        return session


async def error_response(request: Request, error: Exception) -> JSONResponse:
    """Return an error as the OpenAI API writes it."""
    if isinstance(error, AgentError):
        status = 409 if error.kind == "episode_over" else 400
        error = refusal(status, str(error), code=CODES.get(error.kind))
    elif not isinstance(error, HTTPException):
        error = refusal(500, str(error))
    return JSONResponse({"error": error.detail}, error.status_code)


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what work for a client returns; it is cancelled when the client leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())  # only a disconnect follows the body
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise AgentError("the client has left", "episode_over")
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
