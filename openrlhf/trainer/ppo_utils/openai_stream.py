"""A chat answer as server-sent events, while it is sampled.

What was said cannot be taken back: text goes out as soon as nothing that may follow can change it.
Half a character waits for its other half, and what may become a tool call for its end.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openrlhf.trainer.ppo_utils.agent_engine import TextCodec
from openrlhf.trainer.ppo_utils.openai_requests import (
    APIError,
    ChatAnswer,
    ChatRequest,
    logprob_entries,
)

CALL_MARK = "<tool_call>"
PART_OF_CHARACTER = "\ufffd"
MIN_INTERVAL_S = 0.05  # between two looks at a growing answer: each decodes all of it

Grown = tuple[list[int], list[float]]  # ids and log-probs sampled so far


class TokenWatcher:
    """Carries what an engine's thread shows over to the loop of the server."""

    def __init__(self) -> None:
        self.grown: asyncio.Queue[Grown] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._shown_s = 0.0

    def __call__(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """See OnTokens."""
        now_s = time.monotonic()
        if now_s - self._shown_s >= MIN_INTERVAL_S and not self._loop.is_closed():
            self._shown_s = now_s
            grown = (list(token_ids), list(logprobs))
            self._loop.call_soon_threadsafe(self.grown.put_nowait, grown)


class ChunkStream:
    """The events of one answer."""

    def __init__(self, request: ChatRequest, codec: TextCodec) -> None:
        self.request = request
        self.codec = codec
        self.said = ""
        self._num_told = 0  # tokens whose log-probs went out
        self._has_begun = False
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }

    def more(self, grown: Grown) -> Iterator[str]:
        """The events for what can be said now."""
        token_ids, logprobs = grown
        text = settled_text(
            self.codec.decode(token_ids), reads_tool_calls=self.request.reads_tool_calls
        )
        if len(text) > len(self.said) and text.startswith(self.said):
            yield from self._say(text[len(self.said) :], token_ids, logprobs)

    def end(self, answer: ChatAnswer) -> Iterator[str]:
        """What was not said yet, tool calls, the end, usage where it is wanted."""
        content = answer.reply.content or ""
        if not content.startswith(self.said):
            raise APIError(500, "the text of the answer changed at its end; do not stream it")
        completion = answer.completion
        calls = [
            {"index": index, **call.to_json()} for index, call in enumerate(answer.reply.tool_calls)
        ]
        more = {"tool_calls": calls} if calls else {}
        yield from self._say(
            content[len(self.said) :], completion.token_ids, completion.logprobs, **more
        )
        yield self._chunk({}, finish_reason=answer.finish_reason)
        if self.request.wants_usage:
            yield event({**self._head, "choices": [], "usage": answer.usage})
        yield "data: [DONE]\n\n"

    def _say(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[float], **more: Any
    ) -> Iterator[str]:
        if not self._has_begun:
            self._has_begun = True
            yield self._chunk({"role": "assistant", "content": ""})
        told = None
        if self.request.wants_logprobs:
            new = slice(self._num_told, None)
            entries = logprob_entries(token_ids[new], logprobs[new], self.codec)
            told = {"content": entries, "refusal": None}
        self.said += text
        self._num_told = len(token_ids)
        yield self._chunk({"content": text or None, **more}, logprobs=told)

    def _chunk(
        self, delta: Mapping[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
    ) -> str:
        choice = {
            "index": 0,
            "delta": dict(delta),
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return event({**self._head, "choices": [choice]})


def settled_text(text: str, *, reads_tool_calls: bool) -> str:
    """The beginning of a growing text that stays as it is, whatever follows.

    Where there may be tool calls, that is what stands before the first mark of one, without white
    space at its end; nothing while the text begins with white space, which a call would remove.
    """
    text = text.rstrip(PART_OF_CHARACTER)
    if not reads_tool_calls:
        return text
    if text[:1].isspace():
        return ""
    before, mark, _ = text.partition(CALL_MARK)
    if not mark:
        lengths = range(len(CALL_MARK) - 1, 0, -1)
        cut = next((n for n in lengths if before.endswith(CALL_MARK[:n])), 0)
        before = before[: len(before) - cut]
    return before.rstrip()


def event(body: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
