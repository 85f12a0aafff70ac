"""The process in which user code acts: its agent file, its episodes, on one event loop.

It asks its parent for turns, and ends, with what user code has started, when the parent has gone.
"""

import asyncio
import copy
import inspect
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.errors import ConfigError
from openrlhf.rollout.agents.episode import (
    CURRENT,
    AgentEngine,
    AgentSetup,
    Episode,
    EpisodeRequest,
    EpisodeResult,
    ResultQueue,
    TextCodec,
    first_params,
    named_task,
    result_of,
)
from openrlhf.utils.agent import (
    AgentError,
    AgentExecutorBase,
    AgentInstanceBase,
    MultiTurnAgentExecutor,
    OpenAISession,
    RemoteInstance,
)
from openrlhf.utils.user_code import (
    accepted,
    blaming,
    check_signature,
    defined_at,
    file_of,
    load_module,
    member,
    public_names,
    split_name,
    user_line,
)
from openrlhf.utils.worker_process import LATE_SIGNAL, attend

OUTSIDE = "/outside"  # ends the names of turns that are of no episode that is known

EXECUTOR_NAME = "AgentExecutor"
INSTANCE_NAME = "AgentInstance"
# What an executor may ask for, by the names of its arguments.
INIT_NAMES = ("max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue")
EXECUTE_NAMES = ("max_length", "hf_tokenizer", "llm_engine", "images")
MAX_THREADS = 256  # for plain methods of environments


def serve(connection: socket.socket, token: str, path: str, setup: AgentSetup) -> None:
    """Run episodes until the parent closes the connection; the main function of the process."""
    AgentProcess(setup).run(connection, token)


class AgentProcess:
    """The user's executor, and the episodes that it runs.

    The parent calls "start", "run" with each request, and "alive" now and then. It is asked for
    turns with a sample id and a request.
    """

    def __init__(self, setup: AgentSetup) -> None:
        self.setup = setup
        self._codec = TextCodec(setup.tokenizer, setup.image_processor)
        self._server: Any = None
        self._engine = AgentEngine(self._codec, self._open_session)
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(named_task)
        self._loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS))
        self._num_episodes = Counter[SamplingSettings]()  # that run
        self._running: dict[str, asyncio.Future[EpisodeResult]] = {}  # by sample id; of the thread

    def run(self, connection: socket.socket, token: str) -> None:
        """Run what the parent calls, until it has gone."""
        signal.signal(LATE_SIGNAL, self._blame)
        asyncio.set_event_loop(self._loop)
        self._thread, self._parent = attend(connection, token, self._serve)
        while True:
            # User code may call exit(): the loop tells its task and stops; there is more to run.
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    async def _serve(self, name: str, *arguments: Any) -> Any:
        methods = {"start": self._start, "run": self._run, "alive": partial(asyncio.sleep, 0)}
        work = methods[name](*arguments)
        result = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        if name != "run":
            return await result
        [request] = arguments
        self._running[request.sample_id] = result
        try:
            return await result
        finally:
            del self._running[request.sample_id]

    def _ask(self, sample_id: str, request: GenerationRequest) -> Future[Completion]:
        """Ask the engine for a turn of an episode; cancelling the future stops it."""
        asked = self._parent.call(sample_id, request)
        return asyncio.run_coroutine_threadsafe(asked, self._thread.loop)

    async def _start(self) -> None:
        """Make the executor; raises ConfigError."""
        context: dict[str, Any] = {
            "max_steps": self.setup.max_steps,
            "max_length": self.setup.max_length,
            "llm_engine": self._engine,
            "hf_tokenizer": self.setup.tokenizer,
            "result_queue": ResultQueue(),
        }
        path, step_timeout_s = self.setup.path, self.setup.step_timeout_s
        self._executor = make_executor(path, context, step_timeout_s=step_timeout_s)
        asked = {name: context.get(name) for name in EXECUTE_NAMES}
        self._extras = accepted(self._executor.execute, asked)

    def _open_session(self, episode: Episode, params: Mapping[str, Any]) -> OpenAISession:
        if self._server is None:  # only where an agent asks for one
            from openrlhf.rollout.agents.openai_server import OpenAIServer  # noqa: PLC0415

            tokenizer = copy.deepcopy(self._codec.tokenizer)  # the server has its own thread
            self._server = OpenAIServer(TextCodec(tokenizer, self.setup.image_processor))
        session: OpenAISession = self._server.open_session(episode, params)
        return session

    async def _run(self, request: EpisodeRequest) -> EpisodeResult:
        """Return the result of an episode; raises AgentError, EngineError."""
        began_s = time.monotonic()
        episode = Episode(request, self.setup, self._ask)
        kind, named = replace(request.sampling, seed=None), request.sample_id + OUTSIDE
        unknown = Episode(replace(request, sample_id=named), self.setup, self._ask)
        outside = self._engine.outside.setdefault(kind, unknown)
        self._num_episodes[kind] += 1
        CURRENT.set(episode)
        prompt, params = request.prompt, first_params(request.sampling, self.setup.max_length)
        extras = self._extras
        if "images" in extras:
            extras = {**extras, "images": [image.open() for image in prompt.images]}
        acting = asyncio.ensure_future(
            self._executor.execute(prompt.prompt_text, prompt.label, params, **extras)
        )
        try:
            await asyncio.wait({acting}, timeout=self.setup.episode_timeout_s)
            episode.close()
            for engine_error in filter(None, [episode.engine_error, outside.engine_error]):
                raise engine_error
            result = result_of(episode, self._answer_of(acting), outside)
            return replace(result, seconds=time.monotonic() - began_s)
        finally:
            episode.close()
            acting.cancel()
            # Read its error in any case: asyncio would log one that nobody waits for.
            acting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self._num_episodes[kind] -= 1
            if not self._num_episodes[kind]:  # nobody is left for whom it could be
                self._engine.outside.pop(kind).close()

    def _answer_of(self, acting: asyncio.Future[object]) -> object:
        """Return the result of `execute`; raise AgentError for what ended it."""
        path = self.setup.path
        if not acting.done():
            limit_s = self.setup.episode_timeout_s
            message = f"{path}: the episode was not done after {limit_s:g} s"
            raise AgentError(message, "episode_timeout")
        if acting.cancelled():
            raise AgentError(f"{path}: the episode was cancelled by its own code")
        error = acting.exception()
        if error is None:
            return acting.result()
        if isinstance(error, AgentError):
            raise AgentError(f"{user_line(path, error) or path}: {error}", error.kind)
        with blaming(path, AgentError):
            raise error

    def _blame(self, signum: int, frame: FrameType | None) -> None:
        """Fail the episode that holds the event loop, of which the parent has heard nothing for
        longer than a step may take; all of them where the loop runs for none.
        """
        path, file = self.setup.path, file_of(self.setup.path)
        task = asyncio.current_task(self._loop)
        while frame is not None and frame.f_code.co_filename != file:
            frame = frame.f_back
        if task is None and frame is None:  # it is the parent that was late
            return
        error = AgentError(
            f"{path}{f':{frame.f_lineno}' if frame else ''}: blocked the event loop for over "
            f"{self.setup.step_timeout_s:g} s. Use await, asyncio.to_thread or plain functions.",
            "blocked",
        )
        name = "" if task is None else task.get_name()
        self._thread.loop.call_soon_threadsafe(self._fail, name, error)

    def _fail(self, name: str, error: AgentError) -> None:
        running = self._running
        for result in [running[name]] if name in running else list(running.values()):
            if not result.done():
                result.set_exception(error)


def load_agent(path: str | Path) -> tuple[Any, Any]:
    """Return executor and environment of a file, None for one that it lacks: AgentExecutor and
    AgentInstance, or the class of `file.py:Name` alone.

    Raises ConfigError where neither could act, before anything heavy starts.
    """
    file, name = split_name(path)
    module = load_module(file)
    executor: Any = getattr(module, EXECUTOR_NAME, None)
    instance: Any = getattr(module, INSTANCE_NAME, None)
    if name:
        found = member(module, name, file)
        executor, instance = (found, None) if hasattr(found, "execute") else (None, found)
    if executor is not None:
        execute = getattr(executor, "execute", None)
        if not inspect.iscoroutinefunction(execute):
            raise ConfigError(
                f"{defined_at(file, executor)}: {executor.__name__} has no async execute. "
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
    # An `execute` of the user's may call its environment as it likes.
    if instance is not None and (executor is None or executor.execute is AgentExecutorBase.execute):
        check_environment(file, instance)
    return executor, instance


def check_environment(path: str, instance: Any) -> None:
    """Raise ConfigError where a class could not be an environment."""
    name, where = getattr(instance, "__name__", str(instance)), defined_at(path, instance)
    if not (isinstance(instance, type) and issubclass(instance, AgentInstanceBase)):
        raise ConfigError(f"{where}: write class {name}(AgentInstanceBase): {name} is none.")
    if inspect.isabstract(instance):
        raise ConfigError(f"{where}: {name} has no step. Write async def step(self, states).")
    refuse_unknown(path, instance.__init__, ())
    for method in ("reset", "step"):
        check_signature(getattr(instance, method), getattr(AgentInstanceBase, method), path=path)


def make_executor(path: str, context: Mapping[str, Any], *, step_timeout_s: float) -> Any:
    """Return a new executor of a file in either shape; ConfigError when its `__init__` fails.

    `context` has a value for each of INIT_NAMES.
    """
    executor_class, instance_class = load_agent(path)
    _let_ray_kill_instances()
    given = {**context, "agent_instance_cls": instance_class}
    with blaming(path, ConfigError):
        made = executor_class or MultiTurnAgentExecutor
        executor = made(**accepted(made, given))
    if isinstance(executor, AgentExecutorBase):
        if executor.step_timeout_s is None:
            executor.step_timeout_s = step_timeout_s
        executor.max_steps = min(executor.max_steps, context["max_steps"])
        for name in ("agent_instance_cls", *INIT_NAMES):
            if getattr(executor, name) is None:
                setattr(executor, name, given[name])
    return executor


def _let_ray_kill_instances() -> None:
    """Let `ray.kill` of an environment do nothing in this process: older code ends with it, and the
    environment is no actor but ends with its episode.
    """
    ray = sys.modules.get("ray")
    if ray is None or hasattr(ray.kill, "plain"):
        return

    def kill(actor: Any, *, no_restart: bool = True) -> None:
        if not isinstance(actor, RemoteInstance):
            kill.plain(actor, no_restart=no_restart)  # type: ignore[attr-defined]

    kill.plain = ray.kill  # type: ignore[attr-defined]
    ray.kill = kill


def refuse_unknown(path: str | Path, function: Callable[..., Any], known: Sequence[str]) -> None:
    """Raise ConfigError for an argument without a default that nothing is known for."""
    try:
        inspect.signature(function).bind(None, **accepted(function, dict.fromkeys(known)))
    except TypeError as error:
        remedy = f"Known are {', '.join(known)}" if known else "Give it a default"
        raise ConfigError(
            f"{defined_at(path, function)}: {function.__qualname__}: {error}. {remedy}."
        ) from error
