"""The groups and engines of a run as actors in their places on a Ray cluster."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import ray
from ray.util.placement_group import remove_placement_group

from openrlhf.config.generation import GenerationRunConfig
from openrlhf.models.loading import policy_processor
from openrlhf.trainer.local_cluster import Cluster, engine_config, policy_dtype
from openrlhf.trainer.ppo_utils.demands import ClusterView, role_demands
from openrlhf.trainer.ray.launcher import (
    CALL_TIMEOUT_S,
    RayActorGroup,
    RaySession,
    find_cluster,
    ray_session,
)
from openrlhf.trainer.ray.placement import place, view_cluster
from openrlhf.trainer.ray.recovery import EngineRecovery
from openrlhf.trainer.ray.restarts import Restarts
from openrlhf.trainer.ray.vllm_engine import RayEngine, create_vllm_engines
from openrlhf.trainer.ray.watch import (
    Watch,
    Watched,
    WatchedEngine,
    WatchedRank,
    WatchedRay,
)
from openrlhf.utils.gpus import visible_gpus
from openrlhf.utils.memory import keep_freed_memory
from openrlhf.utils.progress import progress, saying_what_is_awaited


def view_of_run() -> ClusterView:
    """Return the devices of the cluster that a run would join, or of this machine, on which it
    would start its own.
    """
    if ray.is_initialized() or find_cluster(os.environ.get("RAY_ADDRESS")) is not None:
        with ray_session():
            return view_cluster()
    num_gpus = len(visible_gpus())
    return ClusterView(num_gpus, os.cpu_count() or 1, num_gpus)


@contextmanager
def ray_cluster(
    config: GenerationRunConfig, classes: Mapping[str, type], *, run_dir: str, resume_step: int
) -> Iterator[Cluster]:
    """Start groups and engines as actors on the Ray cluster; end them at last, and give their
    places back.
    """
    keep_freed_memory()
    with ray_session() as session, ExitStack() as stack:

        def at_the_end(call: Callable[..., object], *args: object) -> None:
            stack.callback(lambda: None if session.is_lost() else call(*args))

        view = view_cluster()
        demands = role_demands(config, view)
        dtype = policy_dtype(config, has_gpus=view.has_gpus)
        # Phases take turns: one role at a time may use all cores. Engines and trainer, where both
        # run at once, share them.
        num_at_once = 2 if config.trains and config.train.async_enable else 1
        slots, place_groups = place(demands, view, num_roles_at_once=num_at_once)
        for place_group in place_groups:
            at_the_end(remove_placement_group, place_group)
        restarts = Restarts(config.train.max_restarts)
        groups = {
            role: RayActorGroup(
                kind, config, slots[role], role=role, run_dir=run_dir, restarts=restarts
            )
            for role, kind in classes.items()
        }
        engines = []
        if "vllm" in slots:
            # The workers of an engine lie on devices that Ray placed; it places no CPU ones.
            executor = "ray" if view.has_gpus else "mp"
            settings = engine_config(
                config, dtype=dtype, resume_step=resume_step, executor=executor
            )
            processor = policy_processor(config)
            engines = create_vllm_engines(
                settings, slots["vllm"], processor, run_dir=run_dir, limits=config.train
            )
        for group in groups.values():
            at_the_end(group.close)
        for engine in engines:
            at_the_end(engine.kill)
        with progress("starting workers", len(groups) + len(engines)) as advance:
            for role, group in groups.items():
                with saying_what_is_awaited(f"{role} to start: see {group.logs}*"):
                    group.join()
                advance()
            start_engines(engines, advance)
        recovery = EngineRecovery(engines, restarts)
        at_the_end(recovery.close)
        stack.enter_context(Watch(_watched(config, session, groups.values(), engines)))
        yield Cluster(demands, view, dtype, groups, engines, recovery)


def start_engines(engines: Iterable[RayEngine], advance: Callable[[], None]) -> None:
    """Start engines side by side: each may take minutes. Raise the first error of one."""
    loading = {engine.load(): engine for engine in engines}
    while loading:
        first, *others = loading.values()
        who = f"{first.name} and {len(others)} more" if others else first.name
        with saying_what_is_awaited(f"{who} to start: see {first.log}*"):
            done, _ = ray.wait([*loading], timeout=CALL_TIMEOUT_S)  # they may fetch their model
        which = (done or [*loading])[0]
        loading.pop(which).ready(timeout_s=1.0, loading=which)
        advance()


def _watched(
    config: GenerationRunConfig,
    session: RaySession,
    groups: Iterable[RayActorGroup],
    engines: Iterable[RayEngine],
) -> Iterator[Watched]:
    limit_s, engine_limit_s = config.train.rank_timeout_s, config.vllm.timeout_s
    for who, process in session.processes.items():
        yield WatchedRay(who, process, limit_s, "--rank_timeout_s")
    for group in groups:
        for rank in range(len(group.handles)):
            yield WatchedRank(group, rank, limit_s)
    for engine in engines:
        yield WatchedEngine(engine, engine_limit_s)
