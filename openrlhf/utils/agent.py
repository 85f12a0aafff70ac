"""What an agent file is written against: the environment of an episode, and executors that run it.

A file defines `AgentExecutor`; the constructor and the `execute` of both known shapes are served:
one made once with engine, tokenizer and queue, and one that is given them with every episode.
What is trained on are the tokens the engine sampled, whatever the code here does with text.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openrlhf.utils.agent_calls import (
    AgentError,
    BadAnswerError,
    ContextFullError,
    RemoteInstance,
    StepTimeoutError,
)
from openrlhf.utils.agent_turns import Turns

__all__ = [
    "AgentError",
    "AgentExecutorBase",
    "AgentInstanceBase",
    "BadAnswerError",
    "ContextFullError",
    "LLMEngine",
    "MultiTurnAgentExecutor",
    "OpenAIAgentExecutor",
    "OpenAISession",
    "SamplingParams",
    "StepTimeoutError",
]

MAX_STEPS = 10_000  # of an episode; the context ends most of them earlier


@dataclass
class SamplingParams:
    """How a turn is sampled, under vLLM's names. Every episode has its own and may change it.

    Temperature, top_p and repetition_penalty stay as the run's: its log-probs are taken with them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    # A turn gets at most what the context leaves, which is what the run's own number stands for.
    max_tokens: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)  # beside the end of a turn
    stop: list[str] = field(default_factory=list)  # texts that are one token each
    seed: int | None = None
    n: int = 1
    logprobs: int | None = 0
    skip_special_tokens: bool = False  # in the text; the token ids are all there
    include_stop_str_in_output: bool = True
    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0

    def clone(self) -> SamplingParams:
        """Return a copy that may be changed by itself."""
        return copy.deepcopy(self)


class LLMEngine(Protocol):
    """What an executor gets as `llm_engine`."""

    def generate(
        self,
        prompt: object,
        sampling_params: object = None,
        request_id: str | None = None,
        **ignored: object,
    ) -> Any:
        """Sample one turn: await it, or iterate over it with `async for`.

        `prompt` is text, token ids or {"prompt_token_ids": ids}. The answer has `.outputs[0]` with
        `.token_ids`, `.text`, `.logprobs` and `.finish_reason`, and `.prompt_token_ids`.
        """

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a whole prompt; those of the data set where the text is its own."""

    def encode_feedback(self, text: str) -> list[int]:
        """Ids of text that follows other text; special tokens spelled in it keep their meaning."""

    def open_session(
        self, sampling_params: object = None, *, ignores_client_sampling: bool = False
    ) -> OpenAISession:
        """An address under which any OpenAI client talks to the policy in this episode.

        A temperature, top_p or penalty that is not the run's is refused, or ignored if wished.
        """


@dataclass(frozen=True)
class OpenAISession:
    """Where and as whom an OpenAI client speaks for one episode; ends with it."""

    base_url: str  # "http://127.0.0.1:<port>/v1"
    api_key: str
    model: str
    columns: Mapping[str, object]  # further columns of the prompt's row


class AgentInstanceBase(ABC):
    """The environment of one episode; every method may be async or plain, `__init__` too.

    Plain methods run in a thread, so that they hold up no other episode.
    """

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> RemoteInstance:
        """Make an environment that is called like a Ray actor, but lives in this process."""
        return RemoteInstance(cls, *args, **kwargs)

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Start: `states` has observation (the prompt) and label; answers {"observation": text}."""
        return {"observation": states["observation"]}

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Judge a turn: `states` has observation_text, action_text, label, sampling_params and
        is_truncated (the turn was cut at a length limit).

        Answers rewards, environment_feedback (text or token ids) and done; scores, extra_logs and
        sampling_params if it likes.
        """


class AgentExecutorBase:
    """Runs episodes of an environment; override `execute` for any other way of acting."""

    step_timeout_s: float | None = None  # of one call of the environment; None: the run's
    agent_instance_cls: type[Any] | None = None
    max_steps: int = MAX_STEPS
    max_length: int | None = None
    llm_engine: Any = None
    hf_tokenizer: Any = None
    result_queue: Any = None

    def __init__(
        self,
        agent_instance_cls: type[Any] | None = None,
        max_steps: int = MAX_STEPS,
        max_length: int | None = None,
        llm_engine: Any = None,
        hf_tokenizer: Any = None,
        result_queue: Any = None,
    ) -> None:
        self.agent_instance_cls = agent_instance_cls
        self.max_steps = max_steps
        self.max_length = max_length
        self.llm_engine = llm_engine
        self.hf_tokenizer = hf_tokenizer
        self.result_queue = result_queue
        # For an `execute` that takes it: --async_num_tasks limits the episodes of every executor.
        self.semaphore = asyncio.Semaphore(sys.maxsize)

    async def generate(self, prompt_ids: Sequence[int], sampling_params: Any) -> Any:
        """Sample one turn; what is returned is described at LLMEngine."""
        return await self.llm_engine.generate(prompt_ids, sampling_params)

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int | None = None,
        hf_tokenizer: Any = None,
        llm_engine: Any = None,
        images: Any = None,
    ) -> dict[str, Any]:
        """Act and step until the environment is done, the context is full or steps run out.

        Rewards add up; scores and extra_logs are the last step's; a turn that was cut, or an
        episode that ran out of room, sets `truncated`. Raises AgentError.
        """
        turns = Turns(
            engine=llm_engine or self.llm_engine,
            instance_cls=self.agent_instance_cls,
            max_steps=self.max_steps,
            max_length=min(filter(None, (max_length, self.max_length)), default=None),
            step_timeout_s=self.step_timeout_s,
        )
        return await turns.run(prompt, label, sampling_params)


class MultiTurnAgentExecutor(AgentExecutorBase):
    """The executor that is made from the environment's class alone."""

    def __init__(self, agent_instance_cls: type[Any]) -> None:
        super().__init__(agent_instance_cls)


class OpenAIAgentExecutor(AgentExecutorBase):
    """Gives `run` an address for OpenAI clients; what they say and hear becomes the sample."""

    # For clients that always send a temperature; else one that is not the run's is refused.
    ignores_client_sampling: bool = False

    async def run(self, session: OpenAISession, prompt: str, label: Any) -> dict[str, Any]:
        """Solve one row; answers {"reward": …, "scores"?: …, "extra_logs"?: …}."""
        raise NotImplementedError

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int | None = None,
        hf_tokenizer: Any = None,
        llm_engine: Any = None,
        images: Any = None,
    ) -> dict[str, Any]:
        """Open a session, run the agent, answer what it answers."""
        engine = llm_engine or self.llm_engine
        session = engine.open_session(
            sampling_params, ignores_client_sampling=self.ignores_client_sampling
        )
        return await self.run(session, prompt, label)
