"""A user's agent file: which class acts, which shape it has, how it is made and called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.errors import ConfigError
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.utils.user_code import blaming, load_module, public_names

EXECUTOR_NAME = "AgentExecutor"
INSTANCE_NAME = "AgentInstance"


@dataclass(frozen=True)
class AgentContext:
    """What an executor may ask for, by the names of its arguments."""

    max_steps: int
    max_length: int
    llm_engine: Any
    hf_tokenizer: Any
    result_queue: Any

    def as_arguments(self) -> dict[str, Any]:
        """By name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class AgentFile:
    """A loaded agent file; ConfigError when it has no executor that could be called."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        module = load_module(path)
        executor = getattr(module, EXECUTOR_NAME, None)
        instance = getattr(module, INSTANCE_NAME, None)
        if not inspect.isclass(executor) and not inspect.isclass(instance):
            found = ", ".join(public_names(module)) or "nothing public"
            raise ConfigError(
                f"{path} has no {EXECUTOR_NAME}; found: {found}. "
                f"Write class {EXECUTOR_NAME}(AgentExecutorBase) in it."
            )
        self.executor_class: Any = executor if inspect.isclass(executor) else None
        self.instance_class: Any = instance if inspect.isclass(instance) else None
        self._check()

    def make_executor(self, context: AgentContext, *, step_timeout_s: float) -> Any:
        """A new executor in either shape; ConfigError when its `__init__` fails."""
        with blaming(self.path, ConfigError):
            executor = self._make(context)
        if isinstance(executor, AgentExecutorBase):
            if executor.step_timeout_s is None:
                executor.step_timeout_s = step_timeout_s
            if executor.agent_instance_cls is None:
                executor.agent_instance_cls = self.instance_class
            executor.max_steps = min(executor.max_steps, context.max_steps)
            for name in ("max_length", "llm_engine", "hf_tokenizer", "result_queue"):
                if getattr(executor, name) is None:
                    setattr(executor, name, getattr(context, name))
        return executor

    def _make(self, context: AgentContext) -> Any:
        if self.executor_class is None:
            return MultiTurnAgentExecutor(self.instance_class)
        arguments = context.as_arguments()
        own = self.executor_class.__init__
        if own in (AgentExecutorBase.__init__, object.__init__):
            return self.executor_class()
        if own is MultiTurnAgentExecutor.__init__:
            return self.executor_class(self.instance_class)
        return self.executor_class(**accepted(self.executor_class, arguments))

    def _check(self) -> None:
        """Refuse what could not be called, before anything heavy starts."""
        if self.executor_class is None:
            if not issubclass(self.instance_class, AgentInstanceBase):
                raise ConfigError(f"{self.path}: {INSTANCE_NAME} is no AgentInstanceBase.")
            return
        execute = getattr(self.executor_class, "execute", None)
        if not inspect.iscoroutinefunction(execute):
            raise ConfigError(
                f"{self.path}: {EXECUTOR_NAME} has no async execute. "
                "Write async def execute(self, prompt, label, sampling_params)."
            )
        names = ("prompt", "label", "sampling_params", *EXECUTE_EXTRAS)
        _refuse_unknown(self.path, execute, {"self": None, **dict.fromkeys(names)})
        if self.executor_class.__init__ is not AgentExecutorBase.__init__:
            own = dict.fromkeys(("self", "agent_instance_cls", *AgentContext.__dataclass_fields__))
            _refuse_unknown(self.path, self.executor_class.__init__, own)


EXECUTE_EXTRAS = ("max_length", "hf_tokenizer", "llm_engine", "images")


def execute_arguments(execute: Callable[..., Any], context: AgentContext) -> dict[str, Any]:
    """Beside prompt, label and sampling_params: what this `execute` asks for, by name."""
    known = {name: context.as_arguments().get(name) for name in EXECUTE_EXTRAS}
    return accepted(execute, known)


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments a callable names; all of them when it takes any."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def _refuse_unknown(path: str, function: Callable[..., Any], known: Mapping[str, Any]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        is_named = parameter.kind not in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        if is_named and parameter.default is inspect.Parameter.empty:
            if parameter.name in known:
                continue
            raise ConfigError(
                f"{path}: {function.__qualname__} needs an argument {parameter.name}, which is "
                f"not known. Known are {', '.join(name for name in known if name != 'self')}."
            )
