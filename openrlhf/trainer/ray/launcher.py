"""Ray at the edge: joins or starts a cluster, runs plain classes as actors, unwraps errors."""

import atexit
import ctypes
import logging
import os
import re
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray._common.utils import get_ray_address_file
from ray._private import ray_constants, services
from ray._private import worker as ray_worker
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)

from openrlhf.config.generation import GenerationRunConfig
from openrlhf.distributed.collectives import is_broken_collective
from openrlhf.errors import (
    ConfigError,
    EngineError,
    LostEngineError,
    LostRankError,
    MachineError,
    NoRestartError,
    OpenRLHFError,
    first_line,
    machine_fault,
)
from openrlhf.trainer.ppo_utils.worker_group import Pending, WorkerGroup
from openrlhf.trainer.ray.deaths import (
    death_of_worker,
    is_dead,
    num_ray_processes,
    pid_in,
    ray_processes,
)
from openrlhf.trainer.ray.end_after import TOLD, ending_after_this_process
from openrlhf.trainer.ray.placement import wait_for_node
from openrlhf.trainer.ray.restarts import PAUSE_S, Restarts
from openrlhf.trainer.ray.utils import node_address, own_gpu
from openrlhf.trainer.workers.weight_sync import ObjectTransport
from openrlhf.utils import stopping
from openrlhf.utils.console import LOGGER, warn
from openrlhf.utils.framework_logs import with_last_lines
from openrlhf.utils.progress import Health, saying_what_is_awaited
from openrlhf.utils.run_folder import LOGS
from openrlhf.utils.threads import where_is, yield_cores
from openrlhf.utils.worker_process import end_tree, is_stopped

QUIET = {"log_to_driver": False, "logging_level": "ERROR"}
UNNAMED = (None, "", "auto")  # values of RAY_ADDRESS that leave the choice to us
CONNECT_TIMEOUT_S = 10.0  # for a cluster that is said to be there
CALL_TIMEOUT_S = 4 * 3600.0  # no call of a worker takes longer: load, generate, update, export
PEERS_S = 5.0  # until Ray knows of a death that a rank in a collective with the dead knows of
NODE_S = 60.0  # the same where the collective is broken: of the end of a node it knows late
# Calls that run while the actor is at work:
HEALTH_GROUP = "health"
ASIDE_GROUP = "aside"  # those that last


@dataclass(frozen=True)
class RaySession:
    """A connection to a cluster.

    Example: `RaySession({"Ray's raylet": psutil.Process(4711), "Ray's GCS": psutil.Process(4702)})`
    """

    processes: Mapping[str, psutil.Process]  # Ray's own on this machine, by name

    def is_lost(self) -> bool:
        """Return True if Ray is dead or stopped: its calls would wait for a minute, or for ever."""
        return any(is_dead(process) or is_stopped(process) for process in self.processes.values())

    def kill_workers(self) -> None:
        """End ranks and engines of a cluster that this program has for itself, with all that they
        have started. Ray's own processes stay: a program whose raylet ends is ended by Ray.
        """
        started: list[psutil.Process] = []
        for process in self.processes.values():
            with suppress(psutil.Error):
                started += process.children()
        for child in started:
            with suppress(psutil.Error):
                if "".join(child.cmdline()).startswith("ray::"):
                    end_tree(child)


@contextmanager
def ray_session() -> Iterator[RaySession]:
    """Join the cluster that the user named (RAY_ADDRESS, a job) or started, else start one here.

    What was joined or started is left or stopped at the end; a connection the caller had stays.
    """
    if ray.is_initialized():
        session = RaySession(ray_processes())
        if session.is_lost() or len(session.processes) < num_ray_processes():  # stopped, or dead
            raise MachineError("The Ray of this program is lost. Start the program again.")
        yield session
        return
    asked = os.environ.get("RAY_ADDRESS")
    address = find_cluster(asked)
    watcher = None
    with _messages_in_log():
        if address is None:
            watcher = _start_here()
        else:
            _join(address, asked)
        session = RaySession(ray_processes())
        try:
            stopping.listen()  # Ray has put a handler of its own in place
            yield session
        finally:
            if session.is_lost():  # Ray's own end would wait
                _leave_ray_behind()
                if watcher is not None:  # another cluster has workers of others, and outlives this
                    session.kill_workers()
                    watcher.send_signal(TOLD)
            else:
                ray.shutdown()
                if watcher is not None:
                    watcher.kill()
                    watcher.wait()


def _leave_ray_behind() -> None:
    """Let the process end, with the exit code it has, without Ray's own end and the destructors of
    its library, which fail without that.
    """
    stopping.leave_behind()
    atexit.unregister(ray_worker.shutdown)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc: its function gets the exit code, as _exit takes it
        libc.on_exit(libc._exit, None)


@contextmanager
def _messages_in_log() -> Iterator[None]:
    """Send to Ray's logger what Ray prints of its processes without asking `log_to_driver`: of each
    that dies a list of guesses, where the run says what is known.
    """

    def log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        logging.getLogger("ray").error("\n".join(data["lines"]))

    shown, ray_worker.print_to_stdstream = ray_worker.print_to_stdstream, log
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = shown


def _join(address: str, asked: str | None) -> None:
    if asked in UNNAMED:  # as Ray does for the user's own head; elsewhere a token is to be meant
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError) as error:  # of another Ray or Python, or a token
        remedy = "Start it with this environment's ray"
        if re.search("token|Failed to connect", str(error)):  # and its address responds
            remedy = "If it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        raise ConfigError(
            f"the Ray cluster at {address} cannot be joined: {first_line(error)}. "
            f"{remedy}, or set RAY_ADDRESS=local."
        ) from error


def _start_here() -> subprocess.Popen[bytes]:
    """Start a cluster for this run alone, which listens on loopback only; return the process that
    ends Ray's own ones after this one.
    """
    # A secret of this cluster alone: else Ray writes one into the user's home, and from then on no
    # `ray job submit` works that does not bring it.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # One that was stopped does not end when it is asked to, and its devices wait: 5 s by default.
    os.environ.setdefault("RAY_kill_worker_timeout_milliseconds", "500")
    before = _descendants()
    # Ray's own switch. Its environment variable is read when Ray is imported, and would change how
    # other clusters are joined.
    is_enabled, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    # A SIGTERM to the group of this process (timeout, scancel) is for this process: it still saves.
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)
    try:
        ray.init(address="local", include_dashboard=False, **QUIET)
    except Exception as error:  # Ray has no class of its own for a start that fails
        raise MachineError(
            f"Ray did not start on this machine: {first_line(error)} Type the command again when "
            "the machine is less busy; `openrlhf ppo-local` does without Ray."
        ) from error
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_enabled
        services.ConsolePopen = popen
    # Ray's own agents would live a minute longer than a process here that was killed.
    names = {process.pid: name for name, process in ray_processes().items()}
    return ending_after_this_process(_descendants() - before, names)


def _descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def find_cluster(asked: str | None) -> str | None:
    """Return the address of the cluster to join, or None if there is none and none was asked for,
    or one that is for this run alone ("local").

    Raise ConfigError if the one asked for does not respond: Ray itself would try for minutes.
    """
    if asked == "local":
        return None
    address = _started_by_user() if asked in UNNAMED else asked
    if address and _responds(address):
        return address
    if asked:
        raise ConfigError(
            f"RAY_ADDRESS is {asked}, and no Ray cluster responds there. "
            "Start one, or unset RAY_ADDRESS."
        )
    if address:
        warn(f"the Ray cluster at {address} does not respond: one is started on this machine.")
    return None


def _started_by_user() -> str | None:
    """Return the address that the user's last `ray start` on this machine left in its file.

    Ray's own search also finds the private clusters of other runs, and those of other users.
    """
    file = Path(get_ray_address_file(None))
    try:
        owner, address = file.stat().st_uid, file.read_text().strip()
    except OSError:
        return None
    return address if owner == os.getuid() else None


def _responds(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _is_of_device(error: RuntimeError) -> bool:
    """Return True for a fault of a device after which its process can compute nothing more."""
    is_of_cuda = isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
    return is_of_cuda and "out of memory" not in str(error)


class RankActor:
    """A rank of a model in a process of its own, under the calls of its group."""

    def __init__(self, worker_class: type, *args: object) -> None:
        self.worker, self.thread_id = worker_class(*args), threading.get_ident()
        self.worker.address = node_address()
        ObjectTransport.put = staticmethod(ray.put)

    def endpoint(self) -> tuple[str, int]:
        """Return an address and a free port for the group's rendezvous (asked of rank 0)."""
        return self.worker.endpoint()  # type: ignore[no-any-return]

    def join(self, host: str, port: int) -> str:
        """Set up the rank; every rank must call it. Return the address of its node."""
        self.worker.join(host, port, local_rank=own_gpu())
        return str(self.worker.address)

    def run(self, method: str, *args: object) -> Any:
        """Call a method of the worker; raise LostRankError where its device is of no more use."""
        self.thread_id = threading.get_ident()
        try:
            return self.worker.run(method, *args)
        except RuntimeError as error:
            if method == "init_model" or not _is_of_device(error):
                raise
            LOGGER.exception("the device failed in %s", method)
            raise LostRankError(f"its device failed: {first_line(error)}") from error

    def aside(self, method: str) -> Any:
        """Call a method of the worker while another one runs."""
        yield_cores()
        return getattr(self.worker, method)()

    def health(self) -> Health:
        """Return the progress of the rank; may be called while it works."""
        return self.worker.health()  # type: ignore[no-any-return]

    def where(self) -> str:
        """Return the calls that the rank is in, the innermost first."""
        return where_is(self.thread_id)


def start_actor(worker_class: type, args: tuple[object, ...], options: dict[str, Any]) -> Any:
    """Start a plain class as a Ray actor with these options; return the handle."""
    actor = ray.remote(concurrency_groups={HEALTH_GROUP: 1, ASIDE_GROUP: 1})(worker_class)
    return actor.options(**options).remote(*args)


def get(
    reference: Any,
    who: str,
    timeout_s: float,
    *,
    log: str = "",
    lost: type[LostEngineError | LostRankError] = LostRankError,
) -> Any:
    """Wait for a Ray result; errors come back as what was raised, naming the worker, whose logs
    begin with `log`.

    Raises `lost` when the worker died, or did not return in `timeout_s` seconds.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, OpenRLHFError):
            is_lost = isinstance(cause, lost)  # though it lives
            names = [who, pid_in(str(error)) if is_lost else ""]
            said = f"{cause} [{', '.join(filter(None, names))}]"
            named = type(cause)(with_last_lines(said, log) if is_lost else said)
            raise named.in_user_code(cause.user_traceback) from cause
        if (fault := machine_fault(cause)) is not None:
            raise MachineError(f"{who}: {fault}") from error
        raise OpenRLHFError(f"{who}: {type(cause).__name__}: {cause}") from error
    except ray.exceptions.GetTimeoutError as error:
        late = f"{who} did not respond in {timeout_s:g} s"
        raise lost(with_last_lines(late, log)) from error
    except ray.exceptions.RayError as error:  # of the actor, its node, or memory
        raise lost(death_of_worker(str(error).strip(), who, log)) from error


class RayActorGroup(WorkerGroup):
    """The ranks of one model as Ray actors; `join` comes before any other call."""

    def __init__(
        self,
        worker_class: type,
        config: GenerationRunConfig,
        slots: Sequence[dict[str, Any]],
        *,
        role: str,
        run_dir: str,
        restarts: Restarts | None = None,
    ) -> None:
        self.role = role
        self.restarts = restarts or Restarts(0)
        self.is_starting = False  # again
        self.is_closed = False
        self.ended: dict[int, str] = {}  # why ranks have ended, of these actors
        self._awaited: list[Sequence[Any]] = []  # results, by those who wait for them
        self._slots, self._limits = slots, config.train
        self._submitting = threading.Lock()  # all ranks have their calls in one order
        self.logs = f"{run_dir}/{LOGS}/{role}-"
        self.ranks_per_share = config.ds.ranks_per_share
        self.num_shares = len(slots) // self.ranks_per_share
        self.nodes: list[str] = []  # address of every rank's node; empty until all have joined
        # `ps` and Ray's tools show the class of an actor: that of the model.
        actor_class = type(worker_class.__name__, (RankActor,), {})
        args = (worker_class, config, role, run_dir)
        self._make = [
            partial(start_actor, actor_class, (*args, rank, len(slots)), slot)
            for rank, slot in enumerate(slots)
        ]
        self.handles = [make() for make in self._make]

    def start_again(self, why: LostRankError | None = None) -> int:
        lost = why
        while True:
            if self.is_closed:
                raise EngineError(f"{lost or self.role}: the run has ended, nothing starts again")
            if lost is not None:
                warn(
                    f"{lost}; {self.role} is started again: {self.restarts.note(self.role, lost)}."
                )
            self.is_starting = True
            self.kill()
            self.nodes, self.ended = [], {}
            self.handles = [make() for make in self._make]
            if self.is_closed:  # meanwhile
                self.kill()
            try:
                with saying_what_is_awaited(f"{self.role} to start again: see {self.logs}*"):
                    size = self._load_again()
            except NoRestartError:
                raise
            except OpenRLHFError as error:  # memory that the dead one still holds, a taken port
                lost = error if isinstance(error, LostRankError) else self._loss(str(error))
                self.kill()
                time.sleep(PAUSE_S)
            else:
                self.is_starting = False
                return size

    def _load_again(self) -> int:
        for rank, handle in enumerate(self.handles):
            wait_for_node(handle, self._slots[rank], self.who(rank), self._limits)
        self.join()
        loading = self._submit("init_model", [self.model_args] * len(self.handles))
        return int(self._wait(loading, self._limits.restart_timeout_s)[0])

    def close(self) -> None:
        """End all ranks; start none again."""
        self.is_closed = True
        self.kill()

    def kill(self) -> None:
        """End all ranks."""
        for handle in self.handles:
            ray.kill(handle)

    def note_death(self, rank: int, handle: Any, why: str) -> None:
        """Note why a rank has ended, unless another actor is in its place, for whoever waits for
        it; say so if nobody does.
        """
        is_known = self.is_starting or self.is_closed or rank in self.ended
        if self.handles[rank] is handle and not is_known:
            self.ended[rank] = why
            if not self._awaited:
                warn(f"{why}; the run goes on until it waits for {self.role}.")

    def end_rank(self, rank: int, handle: Any, why: str) -> None:
        """End a rank that hangs, unless another actor is in its place, and note why."""
        if self.handles[rank] is handle:
            self.note_death(rank, handle, why)
            ray.kill(handle)

    def join(self) -> None:
        """Wait until all ranks are up and have met, at the first start too: no model is loaded or
        fetched before.
        """
        timeout_s = self._limits.restart_timeout_s
        [endpoint] = self._wait([self.handles[0].endpoint.remote()], timeout_s)
        joining = [handle.join.remote(*endpoint) for handle in self.handles]
        self.nodes = self._wait(joining, timeout_s)

    def start(self, method: Callable[..., Any], shares: Iterable[tuple[Any, ...]]) -> Pending:
        objects = []
        for _, share in zip(range(self.num_shares), shares, strict=True):
            # The first is large, as samples are: it is put once for all ranks of the share.
            parts = [*map(ray.put, share[:1]), *share[1:]]
            objects += [parts] * self.ranks_per_share
        references = self._submit(method.__name__, objects)
        return lambda: self._wait(references)[:: self.ranks_per_share]

    def call(self, method: Callable[..., Any], *args: object) -> list[Any]:
        # Many engines are large: they are put once for all ranks.
        own = [ray.put(arg) if isinstance(arg, list | tuple) else arg for arg in args]
        return self._wait(self._submit(method.__name__, [own] * len(self.handles)))

    def call_aside(self, method: Callable[..., Any]) -> list[Any]:
        name, group = method.__name__, ASIDE_GROUP
        calls = [handle.aside.options(concurrency_group=group) for handle in self.handles]
        return self._wait([call.remote(name) for call in calls])

    def _submit(self, method: str, args: Sequence[Sequence[Any]]) -> list[Any]:
        with self._submitting:
            return [
                handle.run.remote(method, *own)
                for handle, own in zip(self.handles, args, strict=True)
            ]

    def _wait(self, references: Sequence[Any], timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """Return all results, or raise the first error, whichever rank it is on: its peers hang in
        a collective. LostRankError if `timeout_s` seconds bring none.
        """
        results: dict[Any, Any] = {}
        rank_of = {reference: rank for rank, reference in enumerate(references)}
        waiting = list(references)
        self._awaited.append(references)
        try:
            while waiting:
                done, waiting = ray.wait(waiting, timeout=timeout_s)
                if done and waiting:  # a wait for each of many ranks takes long
                    more, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
                    done += more
                if not done:
                    rank = rank_of[waiting[0]]
                    late = f"{self.who(rank)} did not respond in {timeout_s:g} s"
                    raise self._loss(with_last_lines(late, f"{self.logs}{rank}"))
                for reference in done:
                    rank = rank_of[reference]
                    try:
                        results[reference] = self._get(reference, rank, timeout_s)
                    except OpenRLHFError as error:
                        lost = self._lost_rank(references, rank, error)
                        if lost is None:
                            raise
                        raise lost from error
        finally:
            self._awaited.remove(references)
        return [results[reference] for reference in references]

    def _get(self, reference: Any, rank: int, timeout_s: float) -> Any:
        return get(reference, self.who(rank), timeout_s, log=f"{self.logs}{rank}")

    def _lost_rank(
        self, references: Sequence[Any], rank: int, error: OpenRLHFError
    ) -> LostRankError | None:
        """Return the loss that caused the error of a rank: its own, or that of a peer, which the
        rank may have felt before Ray did.
        """
        felt = getattr(error.__cause__, "cause", error)  # Ray's own error is between the two
        deadline = time.monotonic() + (NODE_S if is_broken_collective(felt) else PEERS_S)
        # One that still works is not lost: it may hang in a collective with this one.
        waiting = [other for other in references if other != references[rank]]
        while waiting and not isinstance(error, LostRankError):
            done, waiting = ray.wait(waiting, timeout=max(deadline - time.monotonic(), 0.0))
            if not done:
                break
            for other in done:
                try:
                    self._get(other, references.index(other), 0.0)
                except LostRankError as of_peer:
                    rank, error = references.index(other), of_peer
                    break
                except OpenRLHFError as of_peer:
                    is_effect = is_broken_collective(getattr(of_peer.__cause__, "cause", of_peer))
                    if is_broken_collective(felt) and not is_effect:
                        raise  # it is what this rank has felt
        if not (isinstance(error, LostRankError) or is_broken_collective(felt)):
            return None
        return self._loss(self.ended.get(rank, str(error)))

    def _loss(self, why: str) -> LostRankError:
        lost = LostRankError(why)
        lost.role = self.role
        return lost

    def who(self, rank: int) -> str:
        """Return a rank in the words of an error."""
        where = f" on node {self.nodes[rank]}" if self.nodes else ""
        return f"{self.role} rank {rank} of {len(self.handles)}{where}"
