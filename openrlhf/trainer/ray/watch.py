"""Health of engines, ranks and Ray itself: one thread of the controller asks each now and then.

A process that does not respond was stopped; one that stays at the same step or micro-batch hangs.
Either is reported after a while and killed at its deadline; another one is started in its place,
or the run ends. The first rank of a role has its progress bar here.
"""

import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import ray

from openrlhf.errors import EngineError, LostEngineError
from openrlhf.trainer.ray.deaths import death_of_ray, death_of_worker, is_dead
from openrlhf.trainer.ray.launcher import HEALTH_GROUP, RayActorGroup
from openrlhf.trainer.ray.vllm_engine import RayEngine
from openrlhf.utils import stopping
from openrlhf.utils.console import warn, warn_once
from openrlhf.utils.framework_logs import with_last_lines
from openrlhf.utils.progress import Advance, Health, Quiet, progress
from openrlhf.utils.threads import IN_CALLS, errors_to
from openrlhf.utils.worker_process import is_stopped

ASK_EVERY_S = 2.0
LOOK_EVERY_S = 0.2  # at Ray's own processes: soon after their death Ray ends this one too
WAIT_S = 10.0  # at the beginning and at the end


@dataclass
class Watched:
    """One process, its last health and how long it has made no progress.

    Example: `Watched("engine vllm-0", actor, 600.0, "--engine_timeout_s")`
    """

    who: str
    handle: Any
    deadline_s: float
    deadline_flag: str
    last: Health | None = None
    quiet: Quiet = field(default_factory=Quiet)
    is_due: bool = False  # to be spoken of
    is_responding: bool = True
    asked: list[Any] = field(default_factory=list)  # the reference of an open request
    has_bar: bool = False  # whether its work is drawn
    bar: ExitStack = field(default_factory=ExitStack)
    show: Advance | None = None  # moves the bar of the present work
    drawn: str | None = None  # the work it is for
    log: str = ""  # begins the names of its logs
    what_follows: ClassVar[str] = "the run ends"

    def hear(self, health: Health | None, seconds: float) -> None:
        """Record a response, or that there was none for `seconds`."""
        is_stuck = health is None or (health.work is not None and health == self.last)
        if is_stuck:
            self.is_due = self.quiet.add(seconds) or self.is_due
        else:
            self.quiet.reset()
        self.is_responding = health is not None
        self.last = health or self.last

    def ask(self, seconds: float) -> None:
        """Record whether it has responded in the `seconds` since the last time, and ask again."""
        if self.asked and not ray.wait(self.asked, timeout=0)[0]:
            self.hear(None, seconds)
            return
        if self.asked:
            self.hear(ray.get(self.asked.pop()), seconds)
        health = self.handle.health.options(concurrency_group=HEALTH_GROUP)
        self.asked = [health.remote()]

    def note_death(self, text: str) -> bool:
        """Note that it is dead, as Ray says in `text`; return True if another one takes its place
        and is to be asked.
        """
        return False

    def where(self) -> str:
        """Return the calls that it is in, if it can say so."""
        return ""

    def end(self, failure: EngineError) -> EngineError | None:
        """End the process; return the error that ends the run, or None if the run goes on."""
        ray.kill(self.handle)
        return failure

    def draw(self) -> None:
        """Show the work that goes on as a bar."""
        work = self.last.work if self.last is not None and self.has_bar else None
        if work != self.drawn:
            self.bar.close()
            self.show = self.bar.enter_context(progress(work)) if work else None
            self.drawn = work
        if self.show is not None and self.last is not None:
            self.show(completed=self.last.num_done, total=self.last.total)

    def describe(self) -> str:
        """Return a sentence: which process made no progress, for how long, and in which work."""
        pid = "" if self.last is None else f" (pid {self.last.pid})"
        work = self.last.work if self.last is not None else None
        what = "has not got on" if self.is_responding else "has not responded"
        doing = f" while {work}" if work else ""
        return f"{self.who}{pid} {what} for {self.quiet.seconds:.0f} s{doing}"


class WatchedRay(Watched):
    """One of Ray's own processes, `handle`, which the system is asked about."""

    def ask(self, seconds: float) -> None:
        health = None if is_stopped(self.handle) else Health(None, 0, None, self.handle.pid)
        self.hear(health, seconds)

    def end(self, failure: EngineError) -> EngineError | None:
        stopping.end_run(failure)  # whoever waits in it would end with it, silently
        return failure


class WatchedActor(Watched):
    """A process in whose place another one is started."""

    what_follows = "it is ended"

    def present(self) -> tuple[Any, str]:
        """Return the present actor, None while a new one is started, and its name in messages."""
        raise NotImplementedError

    def ask(self, seconds: float) -> None:
        actor, who = self.present()
        if actor is None or actor is not self.handle:
            self.quiet.reset()
            self.asked, self.last, self.handle, self.who = [], None, actor, who
        if actor is not None:
            super().ask(seconds)

    def where(self) -> str:
        asked = self.handle.where.options(concurrency_group=HEALTH_GROUP).remote()
        try:
            return str(ray.get(asked, timeout=ASK_EVERY_S))
        except ray.exceptions.RayError:  # of any kind: it is ended all the same
            return ""


class WatchedEngine(WatchedActor):
    """An engine."""

    def __init__(self, engine: RayEngine, deadline_s: float) -> None:
        super().__init__(f"engine {engine.who}", engine.handle, deadline_s, "--engine_timeout_s")
        self.engine, self.log = engine, engine.log

    def hear(self, health: Health | None, seconds: float) -> None:
        if health is not None:
            self.engine.keep(health.made)
            health = health._replace(made=())
        super().hear(health, seconds)

    def present(self) -> tuple[Any, str]:
        engine = self.engine
        return None if engine.is_lost else engine.handle, f"engine {engine.who}"

    def note_death(self, text: str) -> bool:
        why = death_of_worker(text, self.engine.who, self.engine.log)
        self.engine.lose(LostEngineError(why), actor=self.handle)
        return True

    def end(self, failure: EngineError) -> EngineError | None:
        self.engine.lose(LostEngineError(str(failure)), actor=self.handle)
        return None


class WatchedRank(WatchedActor):
    """A rank, whose group is started again by whoever waits for it."""

    def __init__(self, group: RayActorGroup, rank: int, deadline_s: float) -> None:
        handle, flag = group.handles[rank], "--rank_timeout_s"
        super().__init__(group.who(rank), handle, deadline_s, flag, has_bar=rank == 0)
        self.group, self.rank, self.log = group, rank, f"{group.logs}{rank}"

    def present(self) -> tuple[Any, str]:
        group, rank = self.group, self.rank
        return None if group.is_starting else group.handles[rank], group.who(rank)

    def note_death(self, text: str) -> bool:
        self.quiet.reset()
        if self.rank not in self.group.ended:
            why = death_of_worker(text, self.who, self.log)
            self.group.note_death(self.rank, self.handle, why)
        return True

    def end(self, failure: EngineError) -> EngineError | None:
        self.quiet.reset()
        self.group.end_rank(self.rank, self.handle, str(failure))
        return None


class Watch:
    """Asks processes that are up and have a method `health`, inside a `with`."""

    def __init__(self, watched: Iterable[Watched]) -> None:
        self.failure: EngineError | None = None  # why a process was killed
        self._watched = list(watched)
        self._asked_at = time.monotonic()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> None:
        """Ask all of them once: messages about one that stops later need its process id."""
        self._ask_all(0.0)
        asked = [reference for watched in self._watched for reference in watched.asked]
        ray.wait(asked, num_returns=len(asked), timeout=WAIT_S)
        self._ask_all(0.0)
        self._asked_at = time.monotonic()
        stopping.blocked_by(self._stopped_ray)
        self._thread.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ask no more: a question after Ray's end would start Ray anew. If a process was ended
        because it made no progress, raise that in place of the error that followed from it.
        """
        self._is_closed.set()
        self._thread.join(WAIT_S)
        # Workers end with their raylet, perhaps before it is looked at.
        self.failure = self.failure or self._dead_ray()
        if self.failure is not None and isinstance(error, Exception):  # SystemError of Ray too
            raise self.failure from error

    def _run(self) -> None:
        while self.failure is None and not self._is_closed.wait(LOOK_EVERY_S):
            with errors_to(self._note_error):
                self._look()
        for watched in self._watched:
            watched.bar.close()

    def _look(self) -> None:
        """Look at Ray's own processes; ask all processes and judge them where it is time to."""
        if (failure := self._dead_ray()) is not None:
            self.failure = failure
            stopping.end_run(failure)
            return
        now, before = time.monotonic(), self._asked_at
        if now - before < ASK_EVERY_S:
            return
        self._asked_at = now
        # A controller that was itself stopped for an hour has not seen the others rest.
        self._ask_all(min(now - before, 2 * ASK_EVERY_S))
        self._judge()
        for watched in self._watched if self.failure is None else ():
            watched.draw()

    def _note_error(self, error: BaseException) -> None:
        """Say an error that nobody expects here, once: whoever hangs later is still seen."""
        warn_once(f"the watch of processes failed, and goes on: {error!r}")

    def _dead_ray(self) -> EngineError | None:
        """Return the error for one of Ray's own processes that has died, None while all live."""
        for watched in self._watched:
            if isinstance(watched, WatchedRay) and is_dead(watched.handle):
                return death_of_ray(watched.who, watched.handle)
        return None

    def _stopped_ray(self) -> str:
        """Return a line that names one of Ray's own processes that was stopped, if there is one."""
        for watched in self._watched:
            if isinstance(watched, WatchedRay) and is_stopped(watched.handle):
                return f"{watched.who} (pid {watched.handle.pid}) is stopped, and was waited for"
        return ""

    def _ask_all(self, seconds: float) -> None:
        """Record which processes have responded since the last round, and ask them again."""
        for watched in list(self._watched):
            try:
                watched.ask(seconds)
            except ray.exceptions.ActorUnavailableError:  # Ray does not call it dead
                watched.asked = []
                watched.hear(None, seconds)
            except ray.exceptions.RayError as error:
                watched.asked = []
                if not watched.note_death(str(error).strip()):
                    self._watched.remove(watched)

    def _judge(self) -> None:
        """Warn of processes that make no progress; kill one that has reached its deadline."""
        for watched in self._watched:
            if watched.quiet.seconds >= watched.deadline_s:
                self._kill(watched)
                return
            if watched.is_due:
                watched.is_due = False
                limit = f"{watched.deadline_s:.0f} s ({watched.deadline_flag})"
                warn(f"{watched.describe()}; {watched.what_follows} after {limit}.")

    def _kill(self, overdue: Watched) -> None:
        """End the process that holds up the others: of several, one that does not respond."""
        mute = [watched for watched in self._watched if not watched.is_responding]
        # One that waits for another has often had less to do, and has been quiet for longer.
        silent = [other for other in mute if other.quiet.seconds > overdue.quiet.seconds / 2]
        culprit = overdue if not overdue.is_responding else next(iter(silent), overdue)
        limit = f"{overdue.deadline_flag} {overdue.deadline_s:g}"
        where = culprit.where() if culprit.is_responding else ""
        why = f"{culprit.describe()}{where and f'{IN_CALLS}{where}'}, and was ended ({limit})"
        self.failure = culprit.end(EngineError(with_last_lines(why, culprit.log)))
