"""A loopback server that speaks the OpenAI API for the policy: /v1/chat/completions, /v1/models,
/v1/tokenize, /health.

The API key says which episode a request belongs to. The server has a thread and a loop of its own,
so that clients that block theirs are served all the same.
"""

import asyncio
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

import uvicorn
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from openrlhf.datasets.chat import Message, RowError, render, to_messages
from openrlhf.datasets.pictures import values_in
from openrlhf.datasets.template_fields import REASONING
from openrlhf.engines.base import Completion
from openrlhf.errors import ConfigError, EngineError
from openrlhf.rollout.agents.episode import Episode, TextCodec, read_image, sample_turn, stop_texts
from openrlhf.utils.agent import AgentError, BadAnswerError, OpenAISession
from openrlhf.utils.images import Picture

KEPT_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", *REASONING)
# The form that Hermes and Qwen models write: one JSON object between two marks, any number of them.
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


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
        """Return the tools that the policy may call; None without any."""
        return None if self.tool_choice == "none" else self.tools or None


class ChatSession:
    """One episode as its client sees it."""

    def __init__(self, episode: Episode, codec: TextCodec, base: Mapping[str, Any]) -> None:
        self.episode = episode
        self.codec = codec
        self.base = base  # sampling of the episode, under what a request says
        self.dialogue = Dialogue(codec, episode.request.prompt.columns.get("chat_template_kwargs"))

    async def chat(self, body: bytes) -> tuple[ChatRequest, dict[str, Any]]:
        """Sample the next turn and return its response; raises HTTPException and AgentError."""
        request = parsed(body)
        extra = request.model_extra or {}
        if request.model != MODEL_NAME:
            message = f"model is {request.model!r}. Use {MODEL_NAME!r}, as session.model says."
            raise refusal(400, message, param="model", code="model_not_found")
        sampling = {name: value for name, value in extra.items() if value is not None}
        limit = request.max_completion_tokens or request.max_tokens
        params = {**self.base, **sampling, **({"max_tokens": limit} if limit else {})}
        turn = self.dialogue.prepare(request.messages, request.shown_tools)
        num_prompt_tokens = len(turn.token_ids)
        completion = await sample_turn(
            self.episode, turn.token_ids, params, self.codec, turn.images
        )
        reads_tool_calls = request.shown_tools is not None
        stops = [*self.episode.request.sampling.stop, *stop_texts(params)]
        message = self.dialogue.note(turn, completion, stops, reads_tool_calls=reads_tool_calls)
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
            ids = self.codec.prompt_ids(request.prompt, self.episode)
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

    def open_session(self, episode: Episode, params: Mapping[str, Any]) -> OpenAISession:
        """Return address and key for an episode, valid as long as it runs."""
        session = ChatSession(episode, self._codec, params)
        key = f"sk-{secrets.token_hex(16)}"
        episode.sessions.append(session)
        self._sessions[key] = session
        prompt = episode.request.prompt
        images = [image.data_url() for image in prompt.images]
        sampling = episode.request.sampling
        return OpenAISession(
            self.base_url,
            key,
            MODEL_NAME,
            prompt.columns,
            images,
            sampling.temperature,
            sampling.top_p,
        )

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
    """Return the result of work for a client; it is cancelled when the client leaves."""
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


@dataclass
class Turn:
    """A turn of the dialogue: its prompt, and what was said once it is sampled.

    Example: for "2+2=" the policy sampled "4" and an end: `text` "4", `stop_text` "<|im_end|>",
    `message` {"role": "assistant", "content": "4"}.
    """

    messages: list[Message]  # that it follows, as clients write them
    spoken: list[Message]  # the same with the policy's own words in its messages
    tools: object
    rendered: str  # of `spoken`, with the beginning of the answer
    token_ids: list[int]  # prompt, then answer
    images: list[Picture]  # of the prompt
    text: str = ""  # as it was sampled, without the token or text that ended it
    stop_text: str = ""  # that ended it; empty when it was cut
    message: Message = field(default_factory=dict)  # the assistant's message of the API


class Dialogue:
    """Turns messages into prompts that go on from what was sampled wherever that is possible.

    A message that the policy wrote comes back from the client as text. Where the chat template
    keeps it as it was, the sampled ids themselves stay in the next prompt; where it does not
    (reasoning cut out, white space trimmed), the dialogue is rendered anew and the trace begins a
    segment.
    """

    def __init__(self, codec: TextCodec, variables: object = None) -> None:
        """`variables` are those that the row sets for the chat template."""
        self.codec, self.variables = codec, variables
        self._turns: list[Turn] = []

    def prepare(self, messages: object, tools: object = None) -> Turn:
        """Return the next turn's prompt; BadAnswerError for messages the template refuses."""
        reads_images = self.codec.processor is not None
        known = checked_messages(messages, reads_images=reads_images)
        wanted = [comparable(message) for message in known]
        images = [sent_image(value) for value in values_in(messages)] if reads_images else []
        last = self._turn_before(wanted, images, tools)
        continued = None if last is None else self._continue(last, wanted, images, tools)
        return continued or self._begin(wanted, images, tools)

    def note(
        self,
        turn: Turn,
        completion: Completion,
        stops: Sequence[str] = (),
        *,
        reads_tool_calls: bool,
    ) -> Message:
        """Remember a sampled turn and return the assistant's message, without the first of the
        `stops` that ended it.
        """
        ids, is_cut = completion.token_ids, completion.finish_reason == "length"
        said = turn.text = self.codec.decode(ids)
        if found := [said.index(stop) for stop in stops if stop in said and not is_cut]:
            turn.text, turn.stop_text = said[: min(found)], said[min(found) :]
        elif not is_cut:
            turn.text, turn.stop_text = map(self.codec.decode, (ids[:-1], ids[-1:]))
        plain: Message = {"role": "assistant", "content": turn.text}
        turn.message = with_tool_calls(turn.text) or plain if reads_tool_calls else plain
        turn.token_ids = [*turn.token_ids, *completion.token_ids]
        self._turns.append(turn)
        return turn.message

    def _turn_before(
        self, messages: list[Message], images: list[Picture], tools: object
    ) -> Turn | None:
        """Return the longest turn whose question and answer the messages begin with."""
        begun = [
            turn
            for turn in self._turns
            if len(turn.messages) < len(messages)
            and turn.tools == tools
            and messages[: len(turn.messages)] == turn.messages
            and images[: len(turn.images)] == turn.images
            and messages[len(turn.messages)] == comparable(turn.message)
        ]
        return max(begun, key=lambda turn: len(turn.messages), default=None)

    def _continue(
        self, last: Turn, messages: list[Message], images: list[Picture], tools: object
    ) -> Turn | None:
        """Return the prompt that follows a turn; None where the template changes the turn.

        The policy's own words stand in for its message, so that a tool call is not written anew.
        """
        own: Message = {"role": "assistant", "content": last.text}
        spoken = [*last.spoken, own, *messages[len(last.messages) + 1 :]]
        rendered = self._render(spoken, tools)
        kept = last.rendered + self.codec.encoder.hide(last.text) + last.stop_text
        if not rendered.startswith(kept):
            return None
        new = images[len(last.images) :]
        ids = [*last.token_ids, *self.codec.encode_continuation(rendered[len(kept) :], new)]
        return Turn(messages, spoken, tools, rendered, ids, images)

    def _begin(self, messages: list[Message], images: list[Picture], tools: object) -> Turn:
        rendered = self._render(messages, tools)
        ids = self.codec.expanded(self.codec.encoder.encode_prompt(rendered), images)
        return Turn(messages, messages, tools, rendered, ids, images)

    def _render(self, messages: Sequence[Message], tools: object) -> str:
        try:
            told = {"tools": tools, "variables": self.variables}
            return render(self.codec.encoder, messages, add_generation_prompt=True, **told)
        except (RowError, ConfigError) as error:
            raise BadAnswerError(str(error)) from error


def with_tool_calls(text: str) -> Message | None:
    """Return the message of a text with tool calls; None without any, or with a broken one."""
    calls = []
    for match in TOOL_CALL.finditer(text):
        try:
            call = from_json(match[1])
        except ValueError:
            return None
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False)
        function = {"name": name, "arguments": written}
        calls.append(
            {"id": f"call_{secrets.token_hex(8)}", "type": "function"} | {"function": function}
        )
    if not calls:
        return None
    content = TOOL_CALL.sub("", text).strip() or None
    return {"role": "assistant", "content": content, "tool_calls": calls}


def sent_image(value: object) -> Picture:
    """Return the image of a part of a message, which is sent as a data URL; raises
    BadAnswerError.
    """
    if not isinstance(value, str) or not value.startswith("data:"):
        shown = f"{value:.80}" if isinstance(value, str) else type(value).__name__
        raise BadAnswerError(f"an image is {shown}, not a data URL. Send data:image/png;base64,…")
    return read_image(value, allow_paths=False)


def checked_messages(messages: object, *, reads_images: bool) -> list[Message]:
    """Return messages with known roles and text; raises BadAnswerError naming the bad one."""
    if not isinstance(messages, list) or not messages:
        raise BadAnswerError("messages is not a list with at least one message")
    checked = []
    for index, message in enumerate(messages):
        try:
            (known,) = to_messages([message], reads_pictures=reads_images)
        except RowError as error:
            raise BadAnswerError(f"messages[{index}]: {error}") from error
        checked.append(known)
    return checked


def comparable(message: Mapping[str, Any]) -> Message:
    """Return a message without what clients add or leave out, tool arguments as objects."""
    kept: Message = {key: message[key] for key in KEPT_KEYS if message.get(key)}
    kept["content"] = message.get("content") or ""
    if "tool_calls" in kept:
        kept["tool_calls"] = [function_of(call) for call in message["tool_calls"]]
    return kept


def function_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call as chat templates read it."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if isinstance(arguments, str):  # as the policy's own message has them
        arguments = from_json(arguments)
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
