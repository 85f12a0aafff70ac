"""Workers on Ray have the environment of whoever started the run, and one that fails says what
happened: the error itself, the role, the rank and the node.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import EngineError, NumericsError
from openrlhf.trainer.ppo_utils.demands import RoleDemand
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.placement import place, view_cluster, worker_environment
from openrlhf.trainer.ray.vllm_engine import RayEngine
from openrlhf.trainer.workers.model_worker import ModelWorker
from tests.helpers.processes import OF_CALLER


class Probe(ModelWorker):
    """A worker without a model."""

    def setup(self) -> None:
        """There is nothing to set up."""

    def of_mine(self) -> dict[str, str]:
        """The variables of the worker."""
        return dict(os.environ)

    def fail_on(self, rank: int) -> None:
        """Raise on one rank."""
        if self.rank == rank:
            raise NumericsError("The loss is nan.")

    def die_on(self, rank: int) -> None:
        """End one rank's process."""
        if self.rank == rank:
            os._exit(1)


class Engine:
    """An engine without a model, in a process of its own."""

    def run(self, method: str) -> object:
        """As LLMRayActor does."""
        return getattr(self, method)()

    def ready(self) -> str:
        """As LLMRayActor answers."""
        return "10.0.0.7"

    def sleep(self) -> None:
        """Raise, as an engine may."""
        raise EngineError("The engine has no memory left.")


@pytest.fixture(scope="module")
def group(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayActorGroup]:
    """Two ranks that have joined, of a caller with an environment of its own."""
    run_dir: Path = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as caller:
        for name, value in OF_CALLER.items():
            caller.setenv(name, value)
        caller.setenv("VLLM_HOST_IP", "10.0.0.1")  # of this node
        told = worker_environment(1)
        assert told.items() >= OF_CALLER.items() and "VLLM_HOST_IP" not in told
        slots, [places] = place([RoleDemand("critic", 2, "critic")], view_cluster())
        group = RayActorGroup(
            Probe, PPOConfig(), slots["critic"], role="critic", run_dir=str(run_dir)
        )
    assert group.who(1) == "critic rank 1 of 2"  # nobody knows its node yet
    group.join()
    yield group
    for handle in group.handles:
        ray.kill(handle)
    remove_placement_group(places)


@pytest.mark.slow
def test_a_worker_has_what_the_caller_has(group: RayActorGroup) -> None:
    assert all(found.items() >= OF_CALLER.items() for found in group.call(Probe.of_mine))


@pytest.mark.slow
def test_an_error_of_a_worker_names_role_rank_and_node(group: RayActorGroup) -> None:
    node = ray.nodes()[0]["NodeManagerAddress"]
    assert group.nodes == [node, node]
    with pytest.raises(NumericsError) as caught:
        group.call(Probe.fail_on, 1)
    assert str(caught.value) == f"The loss is nan. [critic rank 1 of 2 on node {node}]"


@pytest.mark.slow
def test_the_death_of_a_worker_names_role_rank_and_node(group: RayActorGroup) -> None:
    with pytest.raises(EngineError) as caught:
        group.call(Probe.die_on, 0)
    assert str(caught.value).startswith(f"critic rank 0 of 2 on node {group.nodes[0]} died: ")


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_an_error_of_an_engine_names_it_and_its_node() -> None:
    actor = ray.remote(Engine).options(num_cpus=0.01).remote()
    engine = RayEngine("vllm-1", handle=actor)
    assert engine.who == "vllm-1"
    engine.ready()
    with pytest.raises(EngineError) as caught:
        engine.call(Engine.sleep)
    assert str(caught.value) == "The engine has no memory left. [vllm-1 on node 10.0.0.7]"
    ray.kill(engine.handle)
