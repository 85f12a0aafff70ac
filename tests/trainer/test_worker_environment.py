"""Workers on Ray have the environment of whoever started the run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from openrlhf.trainer.ray.launcher import start_actor, worker_environment
from openrlhf.trainer.ray.placement import RoleDemand, place, view_cluster
from tests.config.test_environment import OF_CALLER


class Environment:
    """A worker that says what it was given."""

    def of_mine(self) -> dict[str, str]:
        """All variables."""
        return dict(os.environ)


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_CALLER.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def worker(ray_cluster: None, caller: None) -> Iterator[object]:
    slot = place([RoleDemand("ref", 1, "ref")], view_cluster())["ref"][0]
    worker = start_actor(Environment, (), slot)
    yield worker
    ray.kill(worker)
    remove_placement_group(slot.group)


@pytest.mark.usefixtures("caller")
def test_a_worker_is_given_what_the_caller_has() -> None:
    assert worker_environment(1).items() >= OF_CALLER.items()


@pytest.mark.slow
def test_a_worker_of_a_running_cluster_has_what_the_caller_has(worker: object) -> None:
    assert ray.get(worker.of_mine.remote(), timeout=120).items() >= OF_CALLER.items()
