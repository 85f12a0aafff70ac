"""Interface of agent files: the environment of an episode, and executors that run it.

A file defines `AgentExecutor`. Both known shapes of it run: one made once with engine, tokenizer
and queue, and one that is given them with every episode. Training uses the tokens that the engine
sampled, whatever the code here does with text.
"""

import asyncio
import copy
import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from openrlhf.errors import RewardError
from openrlhf.utils.user_code import as_float32, mistyped_key

STEP_KEYS = (
    *("rewards", "scores", "extra_logs", "done"),
    *("environment_feedback", "environment_images", "sampling_params"),
)
MAX_SHOWN = 120  # characters of a value, in a message
MAX_STEPS = 10_000  # of an episode; the context ends most of them earlier


class AgentError(RewardError):
    """An episode ended without a usable answer; `kind` is the name of the failure."""

    kind = "exception"

    def __init__(self, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind or self.kind


class BadAnswerError(AgentError):
    """User code returned something that is no reward, text or flag."""

    kind = "bad_answer"


class ContextFullError(AgentError):
    """There is no room left for the next turn."""

    kind = "context_full"


@dataclass
class SamplingParams:
    """Sampling settings of a turn, under vLLM's names. Every episode has its own and may change it.

    Temperature, top_p and repetition_penalty stay as the run's: its log-probs are taken with them.

    Example: `SamplingParams(max_tokens=64, stop=["</answer>"])`
    """

    temperature: float = 1.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    # A turn gets at most what the context leaves, which is what the run's own number stands for.
    max_tokens: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)  # besides the end of a turn
    stop: list[str] = field(default_factory=list)  # texts that end the turn, and are part of it
    seed: int | None = None
    n: int = 1
    logprobs: int | None = 0
    skip_special_tokens: bool = False  # in the text; the token ids are all there
    include_stop_str_in_output: bool = True
    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0

    def clone(self) -> "SamplingParams":
        """Return a copy that may be changed by itself."""
        return copy.deepcopy(self)


@dataclass(frozen=True)
class OpenAISession:
    """Address and key under which an OpenAI client speaks for one episode; ends with it.

    Example: `OpenAISession("http://127.0.0.1:41253/v1", "sk-5f2e...", "policy", {"level": 3})`
    """

    base_url: str  # "http://127.0.0.1:<port>/v1"
    api_key: str
    model: str
    columns: Mapping[str, object]  # further columns of the prompt's row
    images: Sequence[str] = ()  # of the prompt, as data URLs
    temperature: float = 1.0  # of the run, which differs in an evaluation
    top_p: float = 1.0


class RemoteInstance:
    """An environment under the calls of a Ray actor: `await instance.step.remote(states)`."""

    def __init__(self, instance_cls: type[Any], *args: Any, **kwargs: Any) -> None:
        self._made = asyncio.ensure_future(make_instance(instance_cls, *args, **kwargs))

    def __getattr__(self, name: str) -> SimpleNamespace:
        async def call(*args: Any, **kwargs: Any) -> Any:
            method = getattr(await self._made, name)
            return await call_user(partial(method, *args, **kwargs), timeout_s=None)

        def remote(*args: Any, **kwargs: Any) -> Awaitable[Any]:
            return asyncio.ensure_future(call(*args, **kwargs))

        return SimpleNamespace(remote=remote)


class AgentInstanceBase(ABC):
    """The environment of one episode; every method may be async or plain, `__init__` too.

    Plain methods run in a thread, so that they hold up no other episode.
    """

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> RemoteInstance:
        """Make an environment that is called like a Ray actor, but lives in this process."""
        return RemoteInstance(cls, *args, **kwargs)

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Start an episode.

        `states` has observation (the prompt), label and images. Return {"observation": text}.
        """
        return {"observation": states["observation"]}

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Judge a turn.

        `states` has observation_text, action_text, label, sampling_params and is_truncated (the
        turn was cut at a length limit). Return rewards, environment_feedback (text or token ids)
        and done; optionally scores, extra_logs, sampling_params and environment_images, with a
        placeholder for each in the text.
        """


@dataclass(eq=False)
class AgentExecutorBase:
    """Runs episodes of an environment; override `execute` for any other way of acting.

    Example: `super().__init__(AgentInstance, max_steps=8)` in the `__init__` of `AgentExecutor`.
    """

    agent_instance_cls: type[Any] | None = None
    max_steps: int = MAX_STEPS
    max_length: int | None = None
    llm_engine: Any = None
    hf_tokenizer: Any = None
    result_queue: Any = None
    # Of one call of the environment; None: the run's.
    step_timeout_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # For an `execute` that takes it: --async_num_tasks limits the episodes of every executor.
        self.semaphore = asyncio.Semaphore(sys.maxsize)

    async def generate(self, prompt_ids: Sequence[int], sampling_params: Any) -> Any:
        """Sample one turn. The result has vLLM's form: `.outputs[0]` and `.prompt_token_ids`."""
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

        Rewards add up; extra_logs are the last step's, the score is the last one given. An episode
        out of room or steps sets `truncated`, as a turn cut by the context does. Raises AgentError.
        """
        engine = llm_engine or self.llm_engine
        instance = await self._call(make_instance, self.agent_instance_cls)
        states = {"observation": prompt, "label": label, "images": images}
        start = await self._call(instance.reset, states)
        text = text_of(start, "observation")
        token_ids = list(engine.encode_prompt(text))
        action_ranges: list[tuple[int, int]] = []
        reward, score, is_truncated = 0.0, None, False
        answer: Mapping[str, Any] = {}
        for _ in range(self.max_steps):
            try:
                output = (await engine.generate(token_ids, sampling_params)).outputs[0]
            except ContextFullError:
                is_truncated = True
                break
            states = {
                "observation_text": text,
                "action_text": output.text,
                "label": label,
                "sampling_params": sampling_params,
                "is_truncated": output.finish_reason == "length",
            }
            action_ranges.append((len(token_ids), len(token_ids) + len(output.token_ids)))
            token_ids += output.token_ids
            check_keys(answer := dict_of(await self._call(instance.step, states)), STEP_KEYS)
            reward += as_number(answer.get("rewards"), "rewards")
            score = score if answer.get("scores") is None else answer["scores"]
            if flag_of(answer, "done"):
                break
            feedback_ids, feedback = encoded_feedback(engine, answer)
            token_ids += feedback_ids
            text += output.text + feedback
            sampling_params = answer.get("sampling_params") or sampling_params
        else:
            is_truncated = True
        return {
            "prompt": prompt,
            "label": label,
            "reward": reward,
            "scores": score,
            "extra_logs": answer.get("extra_logs") or {},
            "truncated": is_truncated,
            "observation_tokens": token_ids,
            "action_ranges": action_ranges,
        }

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await call_user(function, *args, timeout_s=self.step_timeout_s)


class MultiTurnAgentExecutor(AgentExecutorBase):
    """The executor that is made from the environment's class alone."""

    def __init__(self, agent_instance_cls: type[Any]) -> None:
        super().__init__(agent_instance_cls)


class OpenAIAgentExecutor(AgentExecutorBase):
    """Gives `run` an address for OpenAI clients; what they say and hear becomes the sample."""

    async def run(self, session: OpenAISession, prompt: str, label: Any) -> dict[str, Any]:
        """Solve one row and return {"reward": …, "scores"?: …, "extra_logs"?: …}."""
        raise NotImplementedError

    async def execute(
        self, prompt: str, label: Any, sampling_params: Any, *_: Any, **given: Any
    ) -> dict[str, Any]:
        """Open a session and return what `run` returns."""
        engine = given.get("llm_engine") or self.llm_engine
        return await self.run(engine.open_session(sampling_params), prompt, label)


async def make_instance(instance_cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Return an object of the class; its `__init__` may be async."""
    if instance_cls is None:
        raise BadAnswerError("the executor has no environment. Give its class to __init__.")
    instance = instance_cls.__new__(instance_cls)
    made = instance.__init__(*args, **kwargs)
    if inspect.isawaitable(made):
        await made
    return instance


async def call_user(function: Callable[..., Any], *args: Any, timeout_s: float | None) -> Any:
    """Return the result of user code; plain functions run in a thread.

    Raises AgentError after `timeout_s` seconds; code that cannot be stopped is left behind.
    """
    is_async = inspect.iscoroutinefunction(function)
    call = asyncio.ensure_future(
        function(*args) if is_async else asyncio.to_thread(function, *args)
    )
    # Read its exception in any case: asyncio would print one that nobody waits for any more.
    call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        done, _ = await asyncio.wait({call}, timeout=timeout_s)
    finally:
        if not call.done():
            call.cancel()
    if not done:
        name = getattr(function, "__qualname__", repr(function))
        raise AgentError(f"{name} did not return in {timeout_s:g} s", "step_timeout")
    return call.result()


def dict_of(answer: Any) -> Mapping[str, Any]:
    """Return the result of `step`; raise BadAnswerError where it is no dict."""
    if not isinstance(answer, Mapping):
        raise BadAnswerError(f"step answered a {type(answer).__name__}, not a dict")
    return answer


def encoded_feedback(engine: Any, answer: Mapping[str, Any]) -> tuple[Sequence[int], str]:
    """Return the token ids and the text of an environment's feedback; raises BadAnswerError."""
    feedback, images = answer.get("environment_feedback"), answer.get("environment_images")
    if images is not None and not isinstance(images, (list, tuple)):
        raise BadAnswerError(f"environment_images is a {type(images).__name__}. Return a list.")
    if isinstance(feedback, str):
        return engine.encode_feedback(feedback, images or ()), feedback
    if images:
        raise BadAnswerError("environment_images needs text as environment_feedback.")
    if isinstance(feedback, (list, tuple)) and all(isinstance(i, int) for i in feedback):
        return feedback, engine.decode_feedback(feedback)
    raise BadAnswerError(
        f"environment_feedback is a {type(feedback).__name__}. Return text or token ids."
    )


def check_keys(answer: Mapping[Any, Any], known: Sequence[str]) -> None:
    """Raise BadAnswerError for a key that is nearly one that is read and is not there."""
    if mistake := mistyped_key(answer, known):
        raise BadAnswerError(mistake)


def as_number(value: Any, name: str) -> float:
    """Return the finite float of a number or a one-element tensor; raises BadAnswerError."""
    value = _only_element(value)
    if not isinstance(value, (bool, int, float)):
        raise BadAnswerError(
            f"{name} is {value!r:.{MAX_SHOWN}}, not a number. Return one finite number."
        )
    number = as_float32(value)
    if not math.isfinite(number):
        raise BadAnswerError(f"{name} is {number} in float32. Return one finite number.")
    return number


def _only_element(value: Any) -> Any:
    """Return the number in a tensor or array of one element, and anything else as it is."""
    shape = getattr(value, "shape", None)
    has_one = shape is not None and math.prod(shape) == 1
    return value.reshape(-1)[0].item() if has_one else value


def flag_of(answer: Mapping[str, Any], name: str) -> bool:
    """Return a bool of an answer, also from a one-element tensor; raises BadAnswerError."""
    value = _only_element(answer.get(name))
    if not isinstance(value, (bool, int)):
        raise BadAnswerError(f"{name} is {value!r}. Return True or False.")
    return bool(value)


def text_of(answer: Any, name: str) -> str:
    """Return the text under a name of an answer, or the answer itself; raises BadAnswerError."""
    text = answer.get(name) if isinstance(answer, Mapping) else answer
    if not isinstance(text, str):
        raise BadAnswerError(f"{name} is a {type(text).__name__}, not text")
    return text
