"""The loop of one episode: sample a turn, let the environment judge it, append what it says.

Tokens are kept as they were sampled; text is only shown to the environment.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrlhf.utils.agent_calls import (
    BadAnswerError,
    ContextFullError,
    as_number,
    call_user,
    flag_of,
    make_instance,
    text_of,
)


@dataclass
class Turns:
    """The loop of one episode, and what it has said so far."""

    engine: Any
    instance_cls: type[Any] | None
    max_steps: int
    max_length: int | None
    step_timeout_s: float | None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    action_ranges: list[tuple[int, int]] = field(default_factory=list)
    reward: float = 0.0
    answer: Mapping[str, Any] = field(default_factory=dict)  # of the last step
    is_truncated: bool = False

    async def run(self, prompt: str, label: Any, sampling_params: Any) -> dict[str, Any]:
        """The whole episode."""
        instance = await self._call(make_instance, self.instance_cls)
        start = await self._call(instance.reset, {"observation": prompt, "label": label})
        self.text = text_of(start, "observation")
        self.token_ids = list(self.engine.encode_prompt(self.text))
        for _ in range(self.max_steps):
            if not await self._act_and_step(instance, label, sampling_params):
                break
            sampling_params = self.answer.get("sampling_params") or sampling_params
        else:
            self.is_truncated = True
        return {
            "prompt": prompt,
            "label": label,
            "reward": self.reward,
            "scores": self.answer.get("scores"),
            "extra_logs": self.answer.get("extra_logs") or {},
            "truncated": self.is_truncated,
            "observation_tokens": self.token_ids,
            "action_ranges": self.action_ranges,
        }

    async def _act_and_step(self, instance: Any, label: Any, sampling_params: Any) -> bool:
        """One turn; answers whether there is another."""
        try:
            params, room = _within(sampling_params, self.max_length, len(self.token_ids))
            result = await self.engine.generate(self.token_ids, params)
        except ContextFullError:
            self.is_truncated = True
            return False
        output = result.outputs[0]
        states = {
            "observation_text": self.text,
            "action_text": output.text,
            "label": label,
            "sampling_params": sampling_params,
            "is_truncated": output.finish_reason == "length",
        }
        self._append(output.token_ids, output.text, is_action=True)
        # A turn that stops at a limit of its own is as long as the agent wanted it.
        has_own_limit = params.max_tokens is not None and params.max_tokens != room
        self.is_truncated |= output.finish_reason == "length" and not has_own_limit
        answer = await self._call(instance.step, states)
        if not isinstance(answer, Mapping):
            raise BadAnswerError(f"step answered a {type(answer).__name__}, not a dict")
        self.answer = answer
        self.reward += as_number(answer.get("rewards"), "rewards")
        if flag_of(answer, "done"):
            return False
        feedback = answer.get("environment_feedback")
        ids, text = self._encode(feedback)
        self._append(ids, text, is_action=False)
        return True

    def _append(self, token_ids: Sequence[int], text: str, *, is_action: bool) -> None:
        if is_action:
            start = len(self.token_ids)
            self.action_ranges.append((start, start + len(token_ids)))
        self.token_ids.extend(token_ids)
        self.text += text

    def _encode(self, feedback: Any) -> tuple[Sequence[int], str]:
        if isinstance(feedback, str):
            return self.engine.encode_feedback(feedback), feedback
        if isinstance(feedback, (list, tuple)) and all(isinstance(i, int) for i in feedback):
            return feedback, ""
        raise BadAnswerError(
            f"environment_feedback is a {type(feedback).__name__}. Return text or token ids."
        )

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await call_user(function, *args, timeout_s=self.step_timeout_s)


def _within(
    sampling_params: Any, max_length: int | None, num_tokens: int
) -> tuple[Any, int | None]:
    """The parameters with at most the tokens that fit, and how many do; raises ContextFullError."""
    if max_length is None:
        return sampling_params, None
    room = max_length - num_tokens
    if room < 1:
        raise ContextFullError(f"{num_tokens} tokens fill the context of {max_length}")
    limited = copy.copy(sampling_params)
    limited.max_tokens = room if limited.max_tokens is None else min(limited.max_tokens, room)
    return limited, room
