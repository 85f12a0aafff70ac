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


def load_agent(path: str | Path) -> tuple[Any, Any]:
    """Return AgentExecutor and AgentInstance of a file, None for one that it lacks.

    Raises ConfigError where neither could act, before anything heavy starts.
    """
    module = load_module(path)
    executor = getattr(module, EXECUTOR_NAME, None)
    instance = getattr(module, INSTANCE_NAME, None)
    if executor is not None:
        execute = getattr(executor, "execute", None)
        if not inspect.iscoroutinefunction(execute):
            raise ConfigError(
                f"{path}: {EXECUTOR_NAME} has no async execute. "
                "Write async def execute(self, prompt, label, sampling_params)."
            )
        refuse_unknown(path, execute, ("prompt", "label", "sampling_params", *EXECUTE_NAMES))
        refuse_unknown(path, executor.__init__, ("agent_instance_cls", *INIT_NAMES))
    elif instance is None:
        found = ", ".join(public_names(module)) or "nothing public"
        raise ConfigError(
            f"{path} has no {EXECUTOR_NAME}; found: {found}. "
            f"Write class {EXECUTOR_NAME}(AgentExecutorBase) in it."
        )
    elif not issubclass(instance, AgentInstanceBase):
        raise ConfigError(f"{path}: {INSTANCE_NAME} is no AgentInstanceBase.")
    return executor, instance


def make_executor(path: str, context: Mapping[str, Any], *, step_timeout_s: float) -> Any:
    """Return a new executor of a file in either shape; ConfigError when its `__init__` fails.

    `context` has a value for each of INIT_NAMES.
    """
    executor_class, instance_class = load_agent(path)
    with blaming(path, ConfigError):
        executor = make(executor_class, instance_class, context)
    if isinstance(executor, AgentExecutorBase):
        if executor.step_timeout_s is None:
            executor.step_timeout_s = step_timeout_s
        executor.max_steps = min(executor.max_steps, context["max_steps"])
        given = {**context, "agent_instance_cls": instance_class}
        for name in ("agent_instance_cls", *INIT_NAMES):
            if getattr(executor, name) is None:
                setattr(executor, name, given[name])
    return executor


def make(executor_class: Any, instance_class: Any, context: Mapping[str, Any]) -> Any:
    """Call the constructor with what it names."""
    if executor_class is None:
        return MultiTurnAgentExecutor(instance_class)
    own = executor_class.__init__
    if own in (AgentExecutorBase.__init__, object.__init__):
        return executor_class()
    if own is MultiTurnAgentExecutor.__init__:
        return executor_class(instance_class)
    return executor_class(**accepted(executor_class, context))


def refuse_unknown(path: str | Path, function: Callable[..., Any], known: Iterable[str]) -> None:
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
