"""Calling what users write for an episode: with a deadline, and a strict look at the answer."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from openrlhf.errors import RewardError
from openrlhf.utils.numbers import as_float32


class AgentError(RewardError):
    """An episode ended without an answer that can be used; `kind` is the outcome's name."""

    kind = "exception"


class StepTimeoutError(AgentError):
    """User code did not return in time."""

    kind = "step_timeout"


class BadAnswerError(AgentError):
    """User code answered something that is no reward, text or flag."""

    kind = "bad_answer"


class ContextFullError(AgentError):
    """There is no room left for the next turn."""

    kind = "context_full"


async def make_instance(instance_cls: Any, *args: Any, **kwargs: Any) -> Any:
    """An object of the class; its `__init__` may be async."""
    if instance_cls is None:
        raise BadAnswerError("the executor has no environment. Give its class to __init__.")
    instance = instance_cls.__new__(instance_cls)
    made = instance.__init__(*args, **kwargs)
    if inspect.isawaitable(made):
        await made
    return instance


class RemoteInstance:
    """An environment under the calls of a Ray actor: `await instance.step.remote(states)`."""

    def __init__(self, instance_cls: type[Any], *args: Any, **kwargs: Any) -> None:
        self._made = asyncio.ensure_future(make_instance(instance_cls, *args, **kwargs))

    def __getattr__(self, name: str) -> RemoteMethod:
        return RemoteMethod(self._made, name)


@dataclass(frozen=True)
class RemoteMethod:
    """A method of a RemoteInstance."""

    instance: asyncio.Future[Any]
    name: str

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Start a call; the future that is returned is to be awaited."""
        return asyncio.ensure_future(self._call(*args, **kwargs))

    async def _call(self, *args: Any, **kwargs: Any) -> Any:
        method = getattr(await self.instance, self.name)
        return await call_user(partial(method, *args, **kwargs), timeout_s=None)


async def call_user(function: Callable[..., Any], *args: Any, timeout_s: float | None) -> Any:
    """What user code answers; plain functions run in a thread.

    Raises StepTimeoutError after `timeout_s` seconds; code that cannot be stopped is left behind.
    """
    is_async = inspect.iscoroutinefunction(function)
    call = asyncio.ensure_future(function(*args) if is_async else _in_thread(function, *args))
    try:
        done, _ = await asyncio.wait({call}, timeout=timeout_s)
    finally:
        if not call.done():
            call.cancel()
    if not done:
        name = getattr(function, "__qualname__", repr(function))
        raise StepTimeoutError(f"{name} did not return in {timeout_s:g} s")
    return call.result()


def _in_thread(function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
    """The answer of a plain function from a daemon thread, which no exit has to wait for."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        with _told(loop, answer):
            value = context.run(function, *args)
            loop.call_soon_threadsafe(_settle, answer.set_result, answer, value)

    threading.Thread(target=run, daemon=True, name="agent-step").start()
    return answer


@dataclass(frozen=True)
class _told:
    """A block whose error, if any, goes to a future of a loop instead of the thread."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_settle, self.future.set_exception, self.future, error)
        return True


def _settle(setter: Callable[[Any], None], future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():  # it was cancelled by a deadline
        setter(value)


def as_number(value: Any, name: str) -> float:
    """A finite float of a number, or of a tensor or array that holds one; else BadAnswerError."""
    value = _only_element(value)
    if not isinstance(value, (bool, int, float)):
        raise BadAnswerError(f"{name} is {value!r}, not a number. Return one finite number.")
    number = as_float32(value)
    if not math.isfinite(number):
        shown = str(value) if isinstance(value, float) else "too large"
        raise BadAnswerError(f"{name} is {shown}. Return one finite float32.")
    return number


def _only_element(value: Any) -> Any:
    """What a tensor or array of one element holds; anything else as it is."""
    shape = getattr(value, "shape", None)
    has_one = shape is not None and math.prod(shape) == 1
    return value.reshape(-1)[0].item() if has_one else value


def flag_of(answer: Mapping[str, Any], name: str) -> bool:
    """A bool of an answer, also from a tensor or array of one element; else BadAnswerError."""
    value = _only_element(answer.get(name))
    if not isinstance(value, (bool, int)):
        raise BadAnswerError(f"{name} is {value!r}. Return True or False.")
    return bool(value)


def text_of(answer: Any, name: str) -> str:
    """The text under a name of an answer, or the answer itself; else BadAnswerError."""
    text = answer.get(name) if isinstance(answer, Mapping) else answer
    if not isinstance(text, str):
        raise BadAnswerError(f"{name} is a {type(text).__name__}, not text")
    return text
