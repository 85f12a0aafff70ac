"""A user's agent file: which class acts, which shape it has, how it is made and called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from openrlhf.errors import ConfigError
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.utils.user_code import accepted, blaming, load_module, public_names

EXECUTOR_NAME = "AgentExecutor"
INSTANCE_NAME = "AgentInstance"
# What an executor may ask for, by the names of its arguments.
INIT_NAMES = ("max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue")
EXECUTE_NAMES = ("max_length", "hf_tokenizer", "llm_engine", "images")


class AgentFile:
    """A loaded agent file; ConfigError when it has no executor that could be called."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        module = load_module(path)
        executor = getattr(module, EXECUTOR_NAME, None)
        instance = getattr(module, INSTANCE_NAME, None)
        self.executor_class: Any = executor if inspect.isclass(executor) else None
        self.instance_class: Any = instance if inspect.isclass(instance) else None
        if self.executor_class is not None:
            self._check_executor()
        elif self.instance_class is None:
            found = ", ".join(public_names(module)) or "nothing public"
            raise ConfigError(
                f"{path} has no {EXECUTOR_NAME}; found: {found}. "
                f"Write class {EXECUTOR_NAME}(AgentExecutorBase) in it."
            )
        elif not issubclass(self.instance_class, AgentInstanceBase):
            raise ConfigError(f"{self.path}: {INSTANCE_NAME} is no AgentInstanceBase.")

    def _check_executor(self) -> None:
        """Refuse what could not be called, before anything heavy starts."""
        execute = getattr(self.executor_class, "execute", None)
        if not inspect.iscoroutinefunction(execute):
            raise ConfigError(
                f"{self.path}: {EXECUTOR_NAME} has no async execute. "
                "Write async def execute(self, prompt, label, sampling_params)."
            )
        refuse_unknown(self.path, execute, ("prompt", "label", "sampling_params", *EXECUTE_NAMES))
        refuse_unknown(self.path, self.executor_class.__init__, ("agent_instance_cls", *INIT_NAMES))

    def make_executor(self, context: Mapping[str, Any], *, step_timeout_s: float) -> Any:
        """Return a new executor in either shape; ConfigError when its `__init__` fails.

        `context` has a value for each of INIT_NAMES.
        """
        with blaming(self.path, ConfigError):
            executor = self._make(context)
        if isinstance(executor, AgentExecutorBase):
            if executor.step_timeout_s is None:
                executor.step_timeout_s = step_timeout_s
            if executor.agent_instance_cls is None:
                executor.agent_instance_cls = self.instance_class
            executor.max_steps = min(executor.max_steps, context["max_steps"])
            for name in INIT_NAMES[1:]:
                if getattr(executor, name) is None:
                    setattr(executor, name, context[name])
        return executor

    def _make(self, context: Mapping[str, Any]) -> Any:
        if self.executor_class is None:
            return MultiTurnAgentExecutor(self.instance_class)
        own = self.executor_class.__init__
        if own in (AgentExecutorBase.__init__, object.__init__):
            return self.executor_class()
        if own is MultiTurnAgentExecutor.__init__:
            return self.executor_class(self.instance_class)
        return self.executor_class(**accepted(self.executor_class, context))


def refuse_unknown(path: str, function: Callable[..., Any], known: Iterable[str]) -> None:
    """Raise ConfigError for an argument without a default that nothing is known for."""
    for parameter in inspect.signature(function).parameters.values():
        is_needed = parameter.default is inspect.Parameter.empty and parameter.kind not in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        if is_needed and parameter.name not in ("self", *known):
            raise ConfigError(
                f"{path}: {function.__qualname__} needs an argument {parameter.name}, which is "
                f"not known. Known are {', '.join(known)}."
            )
