"""Rollout engines as Ray actors: an event loop around the thread that steps vLLM."""

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import ray

from openrlhf.config.generation import AgentsConfig
from openrlhf.engines.base import (
    Beginning,
    Completion,
    GenerationRequest,
    Result,
    WeightBucket,
)
from openrlhf.engines.vllm_engine import ABORT_S, VLLMEngine
from openrlhf.engines.weight_transfer import fetched
from openrlhf.errors import LostEngineError, LostRankError, first_line
from openrlhf.trainer.ray.launcher import CALL_TIMEOUT_S, get, start_actor
from openrlhf.trainer.ray.placement import wait_for_node
from openrlhf.trainer.ray.utils import node_address, own_gpu
from openrlhf.utils.console import warn
from openrlhf.utils.framework_logs import redirect_framework_logs, with_last_lines
from openrlhf.utils.images import ImageProcessor
from openrlhf.utils.progress import Health
from openrlhf.utils.run_folder import LOGS
from openrlhf.utils.threads import errors_to, where_is

REPORT_EVERY_S = 10.0  # tokens of unfinished responses, for another engine if this one is lost
MAX_CONCURRENT_CALLS = 10_000  # requests that wait in an actor's event loop
# Calls that wait for nobody else, and what is said of one that does not end.
OWN_WORK = {
    VLLMEngine.sleep.__name__: "falling asleep",
    VLLMEngine.wake_up.__name__: "waking up",
}


class LLMRayActor(VLLMEngine):
    """A vLLM engine in a process of its own."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        processor: ImageProcessor | None,
        name: str,
        run_dir: str,
    ) -> None:
        self.settings, self.processor = settings, processor
        self.name, self.run_dir = name, run_dir
        self._made: SimpleQueue[Beginning] = SimpleQueue()  # for `health`
        self._num_known: dict[tuple[str, int], int] = {}  # tokens of each sample in it so far
        self._is_asked = False  # for more of them
        self._reported_at = time.monotonic()

    ends_with = (*VLLMEngine.ends_with, ray.exceptions.RayActorError)  # workers on GPUs are actors
    is_started = False
    own_work: str | None = None  # that goes on now

    def ready(self) -> str:
        """Start the engine; return the address of its node."""
        redirect_framework_logs(self.run_dir, self.name, capture_streams=True)
        index = own_gpu()
        settings = dict(self.settings, device_ids=[index] if index else None)
        super().__init__(settings, self.processor)
        self._thread_id = self._thread.submit(threading.get_ident).result()
        self.is_started = True
        return node_address()

    def health(self) -> Health:
        """Return the progress of the engine; a step is a forward pass."""
        work = self.own_work or ("generating" if self.is_busy else None)
        made = [self._made.get() for _ in range(self._made.qsize())]  # nobody else takes them
        self._is_asked = True
        return Health(work, self.num_steps, None, os.getpid(), made)

    def where(self) -> str:
        """Return the calls that the engine's thread is in, the innermost first."""
        return where_is(self._thread_id)

    def _step(self) -> None:
        """Do a step; now and then, have `health` report what it has made."""
        super()._step()
        is_due = time.monotonic() - self._reported_at > REPORT_EVERY_S
        if is_due and self._is_asked and self.is_busy:
            self._is_asked = False
            with errors_to(self._report_no_more):  # it reads what is not of vLLM's interface
                for beginning in self.new_beginnings(self._num_known):
                    self._made.put(beginning)
                self._reported_at = time.monotonic()

    def _report_no_more(self, error: BaseException) -> None:
        warn(f"unfinished responses are not reported any more: {first_line(error)}")
        self._reported_at = math.inf

    def receive_bucket(self, bucket: WeightBucket) -> None:
        """Load the tensors of one bucket, which may lie in Ray's object store."""
        super().receive_bucket(fetched(bucket, ray.get))

    async def run(self, method: str, *args: object) -> Any:
        """Run a method of this class in a thread, while the event loop takes requests; raise
        LostEngineError if that needs an engine which has not started.
        """
        if not self.is_started and method != LLMRayActor.ready.__name__:
            raise LostEngineError(f"{self.name} has not started")
        self.own_work = OWN_WORK.get(method, self.own_work)
        try:
            return await asyncio.to_thread(getattr(self, method), *args)
        finally:
            if method in OWN_WORK:
                self.own_work = None


@dataclass
class RayEngine:
    """An engine actor seen as an engine, and the next actor in its place; can be sent to other
    workers. Two are equal while they stand for the same actor.

    Example: `RayEngine("vllm-0", "out/logs/vllm-0", num_starts=1, make=make, node="10.0.0.2")`
    """

    name: str
    log: str = ""  # begins the names of its logs
    num_starts: int = 0
    # Return a new actor, given how many there were.
    make: Callable[[int], Any] | None = field(default=None, compare=False)
    # Wait until a new actor in place of a lost one has a node and a process.
    wait_placed: Callable[[Any], None] | None = field(default=None, compare=False)
    restart_timeout_s: float = field(default=CALL_TIMEOUT_S, compare=False)
    handle: Any = field(default=None, compare=False)
    node: str = field(default="", compare=False)  # address of its node; empty until it is up
    is_lost: bool = field(default=False, compare=False)
    # Is told here, where engines are started; others see the error alone.
    on_lost: Callable[["RayEngine", LostEngineError], None] | None = field(
        default=None, compare=False
    )
    # While it is lost: the rank that is to be started again before it can have weights.
    waits_for: LostRankError | None = field(default=None, compare=False)
    requests: dict[str, str] = field(default_factory=dict, compare=False)  # names, by tag
    # Of these, what the actor has reported of each sample.
    made: dict[str, dict[int, list[Beginning]]] = field(default_factory=dict, compare=False)
    _num_requests: int = field(default=0, compare=False)
    _failure: BaseException | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        own = dict.fromkeys(("make", "wait_placed", "on_lost", "waits_for"))
        return vars(self) | own | {"requests": {}, "made": {}}

    @property
    def who(self) -> str:
        """Return the engine in the words of an error."""
        return f"{self.name} on node {self.node}" if self.node else self.name

    @property
    def is_up(self) -> bool:
        """Return False while a new engine is started in its place; raise if none could be."""
        if self._failure is not None:
            raise self._failure
        return not self.is_lost

    def start(self) -> None:
        """Start the actor; `load` or `ready` has it get up."""
        assert self.make is not None
        self.handle, self.node = self.make(self.num_starts), ""
        self.num_starts += 1

    def load(self) -> Any:
        """Have the engine get up; return what `ready` waits for."""
        return self.handle.run.remote(LLMRayActor.ready.__name__)

    def ready(self, timeout_s: float = CALL_TIMEOUT_S, loading: Any = None) -> None:
        """Wait until the engine is up, which `loading` may have begun."""
        actor, loading = self.handle, self.load() if loading is None else loading
        self.node = self._result(loading, timeout_s, actor=actor)

    def restart(self) -> None:
        """Start another actor in place of this one; `ready_again` waits until it is up."""
        self.kill()
        self.start()

    def ready_again(self) -> None:
        """Wait until an actor in place of a lost one is up; raise LostEngineError if that takes too
        long.
        """
        assert self.wait_placed is not None
        self.wait_placed(self.handle)
        self.ready(self.restart_timeout_s)

    def kill(self) -> None:
        """End the actor."""
        ray.kill(self.handle)

    def lose(self, why: LostEngineError, *, actor: Any = None) -> None:
        """Note that the actor is dead, or of no use any more; `actor` may be an earlier one."""
        if actor not in (None, self.handle):
            return
        why = LostEngineError(with_last_lines(str(why), self.log))
        if self.on_lost is None:
            self.give_up(why)
        else:
            self.on_lost(self, why)

    def give_up(self, error: BaseException) -> None:
        """Raise this error wherever the engine is asked for from now on."""
        self._failure = error

    def call(self, method: Callable[..., Result], *args: object) -> Result:
        actor = self.handle
        # Nobody watches one in place of a lost one before it is used.
        limit_s = self.restart_timeout_s if self.is_lost else CALL_TIMEOUT_S
        reference = actor.run.remote(method.__name__, *args)
        return self._result(reference, limit_s, actor=actor)  # type: ignore[no-any-return]

    def _result(self, reference: Any, timeout_s: float, *, actor: Any) -> Any:
        try:
            return get(reference, self.who, timeout_s, log=self.log, lost=LostEngineError)
        except LostEngineError as error:
            self.lose(error, actor=actor)
            raise

    async def sample(self, request: GenerationRequest) -> list[Completion]:
        if not self.is_up:
            raise LostEngineError(f"{self.who} is not up")
        tag = f"{self.num_starts}.{self._num_requests}"
        self._num_requests += 1
        self.requests[tag] = request.request_id
        try:
            return await self._sample(replace(request, tag=tag))
        except LostEngineError as error:
            made = [*self.made.get(tag, {}).items()]  # a report may come meanwhile
            error.made = {k: Beginning.joined(parts) for k, parts in made}
            raise
        finally:
            del self.requests[tag]
            self.made.pop(tag, None)

    def keep(self, reported: Sequence[Beginning]) -> None:
        """Keep what the actor has made for requests that are in flight, as far as it is whole."""
        for part in reported:
            parts = self.made.get(part.tag, {}).get(part.sample, [])
            if part.start == sum(len(each.token_ids) for each in parts):  # none was lost before it
                self.made.setdefault(part.tag, {})[part.sample] = [*parts, part]
            if part.tag not in self.requests:  # it has ended, perhaps just now
                self.made.pop(part.tag, None)

    async def _sample(self, request: GenerationRequest) -> list[Completion]:
        actor = self.handle
        reference = actor.sample.remote(request)
        pending = asyncio.wrap_future(reference.future())
        try:
            await asyncio.wait([pending])
        except asyncio.CancelledError:
            ray.cancel(reference)
            await asyncio.wait([pending], timeout=ABORT_S)
            if pending.done() and not pending.cancelled():
                pending.exception()  # nobody waits for it, and asyncio would print it
            raise
        if pending.exception() is None:
            return pending.result()
        return self._result(reference, 0.0, actor=actor)  # type: ignore[no-any-return]  # raises


def create_vllm_engines(
    settings: Mapping[str, Any],
    slots: Sequence[dict[str, Any]],
    processor: ImageProcessor | None = None,
    *,
    run_dir: str,
    limits: AgentsConfig | None = None,
) -> list[RayEngine]:
    """Start one engine actor a slot; `ready` waits until it is up. `limits` are those of an actor
    in place of a lost one.

    Engine k draws its random numbers from the seed of the settings plus k; one in place of another
    from a seed of its own.
    """
    limits = limits or AgentsConfig()

    def engine_of(index: int, slot: dict[str, Any]) -> RayEngine:
        name, options = f"vllm-{index}", slot | {"max_concurrency": MAX_CONCURRENT_CALLS}

        def make(num_starts: int) -> Any:
            own = dict(settings, seed=settings["seed"] + index + len(slots) * num_starts)
            return start_actor(LLMRayActor, (own, processor, name, run_dir), options)

        def wait_placed(handle: Any) -> None:
            wait_for_node(handle, slot, name, limits, lost=LostEngineError)

        log, limit_s = f"{run_dir}/{LOGS}/{name}", limits.restart_timeout_s
        return RayEngine(name, log, make=make, wait_placed=wait_placed, restart_timeout_s=limit_s)

    engines = [engine_of(index, slot) for index, slot in enumerate(slots)]
    for engine in engines:
        engine.start()
    return engines
