"""Ray at the edge: joins or starts a cluster, runs plain classes as actors, unwraps errors."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._common.utils import get_ray_address_file
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError, EngineError, OpenRLHFError, first_line
from openrlhf.trainer.ppo_utils.worker_group import Pending, WorkerGroup
from openrlhf.trainer.ray.placement import Slot
from openrlhf.utils import stopping
from openrlhf.utils.end_after import ending_after_this_process
from openrlhf.utils.logging import warn

QUIET = {"log_to_driver": False, "logging_level": "ERROR"}
UNNAMED = (None, "", "auto")  # values of RAY_ADDRESS that leave the choice to us
CONNECT_TIMEOUT_S = 10.0  # for a cluster that is said to be there
CALL_TIMEOUT_S = 4 * 3600.0  # no call of a worker takes longer: load, generate, update, export
HEALTH_GROUP = "health"  # calls that are answered while the actor is at work
FORWARDED_PREFIXES = (
    "HF_",
    "WANDB_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",  # libfabric, under NCCL on some clouds
    "TORCH_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "TRITON_",
    "VLLM_",
    "OPENRLHF_",
    "RAY_EXPERIMENTAL_NOSET_",
)
FORWARDED_NAMES = ("TOKENIZERS_PARALLELISM", "CUDA_HOME", "LD_LIBRARY_PATH")
# Processes take turns on the cores: idle threads must sleep soon, but not between two kernels.
IDLE_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}
# Weights are packed into new memory at every sync: in small pages that takes twice as long.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@contextmanager
def ray_session() -> Iterator[None]:
    """Join the cluster that the user named (RAY_ADDRESS, a job) or started, else start one here.

    What was joined or started is left or stopped at the end; a connection the caller had stays.
    """
    if ray.is_initialized():
        yield
        return
    asked = os.environ.get("RAY_ADDRESS")
    address = None if asked == "local" else find_cluster(asked)
    with _started_here() if address is None else _joined(address, asked):
        stopping.listen()  # Ray has put a handler of its own in place
        yield


@contextmanager
def _joined(address: str, asked: str | None) -> Iterator[None]:
    if asked in UNNAMED:  # as Ray does for the user's own head; elsewhere a token is to be meant
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError) as error:  # of another Ray or Python, or a token
        raise ConfigError(
            f"the Ray cluster at {address} cannot be joined: {first_line(error)}. "
            "Start it with this environment's ray, or set RAY_ADDRESS=local."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _started_here() -> Iterator[None]:
    """Start a cluster for this run alone, which listens on loopback only."""
    # A secret of this cluster alone: else Ray writes one into the user's home, and from then on no
    # `ray job submit` works that does not bring it.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    before = _descendants()
    # Ray's own switch. Its environment variable is read when Ray is imported, and would change how
    # other clusters are joined.
    is_enabled, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        ray.init(address="local", include_dashboard=False, **QUIET)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_enabled
    # Ray's own agents would live a minute longer than a process here that was killed.
    watcher = ending_after_this_process(_descendants() - before)
    try:
        yield
    finally:
        ray.shutdown()
        watcher.kill()
        watcher.wait()


def _descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def find_cluster(asked: str | None) -> str | None:
    """Return the address of the cluster to join, or None if there is none and none was asked for.

    Raise ConfigError if the one asked for does not answer: Ray itself would try for minutes.
    """
    if asked and asked.startswith("ray://"):  # Ray's client has limits of its own
        return asked
    address = _started_by_user() if asked in UNNAMED else asked
    if address and _answers(address):
        return address
    if asked:
        raise ConfigError(
            f"RAY_ADDRESS is {asked}, and no Ray cluster answers there. "
            "Start one, or unset RAY_ADDRESS."
        )
    if address:
        warn(f"the Ray cluster at {address} does not answer: one is started on this machine.")
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
    if owner == os.getuid():
        return address
    warn(f"the Ray cluster at {address} is another user's: set RAY_ADDRESS={address} to join it.")
    return None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


def worker_environment(num_threads: int) -> dict[str, str]:
    """Return the caller's credentials and switches for a worker, and threads for the cores."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FORWARDED_PREFIXES) or name in FORWARDED_NAMES
    }
    defaults = IDLE_THREADS | HUGE_PAGES
    environment |= {name: os.environ.get(name, value) for name, value in defaults.items()}
    environment["OMP_NUM_THREADS"] = str(num_threads)
    # An actor that leads workers on GPUs asks for none itself, and must see them all the same.
    environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    return environment


def start_actor(
    worker_class: type,
    args: tuple[object, ...],
    slot: Slot,
    *,
    max_concurrency: int = 1,
) -> Any:
    """Start a plain class as a Ray actor in its slot; return the handle."""
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=slot.group,
        placement_group_bundle_index=slot.bundle_index,
        placement_group_capture_child_tasks=True,
    )
    environment = worker_environment(slot.num_threads)
    if slot.bundles:  # vLLM starts a worker on each of them; the actor itself only leads
        environment["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, slot.bundles))
        environment["VLLM_RAY_PER_WORKER_GPUS"] = str(slot.num_gpus)
    return (
        ray.remote(concurrency_groups={HEALTH_GROUP: 1})(worker_class)
        .options(
            num_cpus=slot.num_cpus,
            num_gpus=0 if slot.bundles else slot.num_gpus,
            scheduling_strategy=strategy,
            max_concurrency=max_concurrency,
            runtime_env={"env_vars": environment},
        )
        .remote(*args)
    )


def get(reference: Any, who: str, timeout_s: float) -> Any:
    """Wait for a Ray result; errors come back as what was raised, naming the worker.

    Raises EngineError when the worker died or did not answer in `timeout_s` seconds.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, OpenRLHFError):
            raise type(cause)(f"{cause} [{who}]") from cause
        raise OpenRLHFError(f"{who}: {type(cause).__name__}: {cause}") from error
    except ray.exceptions.GetTimeoutError as error:
        raise EngineError(f"{who} did not answer in {timeout_s:.0f} s") from error
    except ray.exceptions.RayActorError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        kind, _, message = reason.partition(": ")
        if kind.rpartition(".")[2] == ConfigError.__name__:  # raised while the worker started
            raise ConfigError(f"{message} [{who}]") from None
        raise EngineError(f"{who} died: {reason}") from error


class RayActorGroup(WorkerGroup):
    """The ranks of one model as Ray actors; `join` comes before any other call."""

    def __init__(
        self,
        worker_class: type,
        config: PPOConfig,
        slots: Sequence[Slot],
        *,
        role: str,
        run_dir: str,
    ) -> None:
        self.role = role
        self.ranks_per_share = config.ds.ranks_per_share
        self.num_shares = len(slots) // self.ranks_per_share
        self.nodes: list[str] = []  # address of every rank's node; empty until all have joined
        self.handles = [
            start_actor(worker_class, (config, role, run_dir, rank, len(slots)), slot)
            for rank, slot in enumerate(slots)
        ]

    def join(self) -> None:
        """Wait until all ranks are up and have met."""
        endpoint = get(self.handles[0].master_endpoint.remote(), self.who(0), CALL_TIMEOUT_S)
        self.nodes = self._wait([handle.join.remote(*endpoint) for handle in self.handles])

    def start(self, method: Callable[..., Any], shares: Sequence[tuple[Any, ...]]) -> Pending:
        assert len(shares) == self.num_shares, "one piece of work a share"
        references = [
            handle.run.remote(method.__name__, *shares[rank // self.ranks_per_share])
            for rank, handle in enumerate(self.handles)
        ]
        return lambda: self._wait(references)[:: self.ranks_per_share]

    def call(self, method: Callable[..., Any], *args: object) -> list[Any]:
        return self._wait([handle.run.remote(method.__name__, *args) for handle in self.handles])

    def _wait(self, references: Sequence[Any]) -> list[Any]:
        """Return all results, or raise the first error, whichever rank it is on: its peers hang in
        a collective.
        """
        results: dict[Any, Any] = {}
        waiting = list(references)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=CALL_TIMEOUT_S)
            for reference in done or waiting:
                who = self.who(references.index(reference))
                results[reference] = get(reference, who, CALL_TIMEOUT_S if done else 0.0)
        return [results[reference] for reference in references]

    def who(self, rank: int) -> str:
        """Return a rank in the words of an error."""
        where = f" on node {self.nodes[rank]}" if self.nodes else ""
        return f"{self.role} rank {rank} of {len(self.handles)}{where}"
