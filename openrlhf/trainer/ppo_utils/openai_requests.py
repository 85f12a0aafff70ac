"""The OpenAI API's words: what a chat request may ask for, and what answers and errors look like.

Knows nothing of sockets and nothing of episodes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openrlhf.engines.base import Completion
from openrlhf.trainer.ppo_utils.agent_chat import Reply
from openrlhf.trainer.ppo_utils.agent_engine import TextCodec

MODEL_NAME = "policy"
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "repetition_penalty",
    "n",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "seed",
)
# Fields that would change the prompt or the text, and the values that do not.
REFUSED = {
    "response_format": (None, {"type": "text"}),
    "functions": (None,),
    "function_call": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "echo": (None, False),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "truncate_prompt_tokens": (None,),
    "modalities": (None, ["text"]),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None, 0),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "ignore_eos": (None, False),
    "use_beam_search": (None, False),
}


class APIError(Exception):
    """An error as a client is told of it."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class ChatRequest:
    """A checked body of /v1/chat/completions."""

    messages: object
    tools: list[dict[str, Any]] | None
    sampling: dict[str, Any]
    model: str
    is_streamed: bool = False
    wants_usage: bool = False
    wants_logprobs: bool = False
    reads_tool_calls: bool = False


def read_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """The request of a body; APIError 400 naming the field that cannot be served."""
    for name, neutral in REFUSED.items():
        if body.get(name) not in neutral:
            raise APIError(400, f"{name} is not supported: {body[name]!r}. Leave it out.", name)
    tools, choice = body.get("tools"), body.get("tool_choice", "auto")
    if tools is not None and not _is_tool_list(tools):
        raise APIError(400, "tools is not a list of {'type': 'function', 'function': …}", "tools")
    if choice not in (None, "auto", "none"):
        raise APIError(400, f"tool_choice is {choice!r}. Use 'auto' or 'none'.", "tool_choice")
    uses_tools = bool(tools) and choice != "none"
    options = body.get("stream_options")
    return ChatRequest(
        messages=body.get("messages"),
        tools=list(tools) if tools and uses_tools else None,
        sampling=_sampling(body),
        model=str(body.get("model") or MODEL_NAME),
        is_streamed=bool(body.get("stream")),
        wants_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        wants_logprobs=bool(body.get("logprobs")),
        reads_tool_calls=uses_tools,
    )


def _is_tool_list(tools: object) -> bool:
    return isinstance(tools, list) and all(
        isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) for tool in tools
    )


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
    limits = [body[n] for n in ("max_completion_tokens", "max_tokens") if body.get(n) is not None]
    return {**sampling, "max_tokens": limits[0]} if limits else sampling


@dataclass(frozen=True)
class ChatAnswer:
    """A sampled turn on its way to the client."""

    request_id: str
    request: ChatRequest
    reply: Reply
    completion: Completion
    num_prompt_tokens: int
    created_at: int

    @classmethod
    def now(
        cls,
        request_id: str,
        request: ChatRequest,
        reply: Reply,
        completion: Completion,
        num_prompt_tokens: int,
    ) -> ChatAnswer:
        """An answer of this second."""
        return cls(request_id, request, reply, completion, num_prompt_tokens, int(time.time()))

    def as_whole(self, codec: TextCodec) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choice = {
            "index": 0,
            "message": {**self.reply.to_message(), "refusal": None},
            "logprobs": self._logprobs(codec),
            "finish_reason": self.finish_reason,
        }
        return {**self._head(), "choices": [choice], "usage": self.usage}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": "chat.completion",
            "created": self.created_at,
            "model": self.request.model,
        }

    @property
    def finish_reason(self) -> str:
        """ "stop", "length" or "tool_calls"."""
        is_call = self.reply.tool_calls and self.completion.finish_reason == "stop"
        return "tool_calls" if is_call else self.completion.finish_reason

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens."""
        num_new = len(self.completion.token_ids)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_new,
            "total_tokens": self.num_prompt_tokens + num_new,
        }

    def _logprobs(self, codec: TextCodec) -> dict[str, Any] | None:
        if not self.request.wants_logprobs:
            return None
        completion = self.completion
        content = logprob_entries(completion.token_ids, completion.logprobs, codec)
        return {"content": content, "refusal": None}


def logprob_entries(
    token_ids: Sequence[int], logprobs: Sequence[float], codec: TextCodec
) -> list[dict[str, Any]]:
    """Each token with its log-prob, as the OpenAI API writes it."""
    entries = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        text = codec.decode([token_id])
        entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        entries.append({**entry, "top_logprobs": []})
    return entries


def without_run_sampling(request: ChatRequest) -> ChatRequest:
    """The request without the settings that the run fixes, for clients that cannot leave them."""
    fixed = ("temperature", "top_p", "repetition_penalty")
    kept = {name: value for name, value in request.sampling.items() if name not in fixed}
    return replace(request, sampling=kept)
