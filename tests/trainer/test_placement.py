"""How roles are counted and placed, without a cluster."""

from __future__ import annotations

import pytest

from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.trainer.ray.cluster import RoleCounts, engine_config, role_counts
from openrlhf.trainer.ray.phases import DevicePhases
from openrlhf.trainer.ray.placement import ClusterView, check_demand, demand_table, pool_sizes

LAPTOP = ClusterView(num_gpus=0, num_cpus=2, max_gpus_per_node=0)
NODE = ClusterView(num_gpus=8, num_cpus=64, max_gpus_per_node=8)


def counts(cluster: ClusterView, **sections: dict) -> RoleCounts:
    config = PPOConfig.model_validate(
        {"actor": {"model_name_or_path": "m"}, "reward": {"model_name_or_path": "r"}} | sections
    )
    return role_counts(config, cluster, has_critic=True, has_reference=True)


def test_a_laptop_gets_one_rank_of_each_and_one_engine() -> None:
    found = counts(LAPTOP)
    assert found.ranks == {"actor": 1, "ref": 1, "reward": 1, "critic": 1}
    assert found.num_engines == 1


def test_an_explicit_number_on_a_laptop_is_that_many_cpu_ranks() -> None:
    found = counts(LAPTOP, actor={"model_name_or_path": "m", "num_gpus_per_node": 3})
    assert found.ranks["actor"] == 3
    check_demand(found.demands, LAPTOP)  # cores may be shared


def test_colocated_roles_share_bundles() -> None:
    found = counts(NODE, train={"colocate_all": True}, vllm={"tensor_parallel_size": 2})
    assert found.num_engines == 4
    assert pool_sizes(found.demands) == {"shared by all": 8}
    apart = counts(NODE, train={"colocate_actor_ref": True, "colocate_critic_reward": True})
    assert pool_sizes(apart.demands) == {"actor": 8, "critic": 8, "vllm": 8}


def test_too_large_a_demand_is_a_table_at_once() -> None:
    found = counts(NODE)
    with pytest.raises(ConfigError, match="need 40, have 8") as error:
        check_demand(found.demands, NODE)
    assert "--colocate_all_models" in str(error.value)
    for role in ("actor", "ref", "reward", "critic", "vllm"):
        assert role in demand_table(found.demands, NODE)


def test_the_engine_gets_the_trainers_type() -> None:
    config = PPOConfig.model_validate({"actor": {"model_name_or_path": "m"}})
    assert engine_config(config, has_gpus=False).dtype == "float32"
    bf16 = PPOConfig.model_validate(
        {"actor": {"model_name_or_path": "m"}, "ds": {"param_dtype": "bf16"}}
    )
    assert engine_config(bf16, has_gpus=False).dtype == "bfloat16"


class FakeSleeper:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake_up(self, tags: object = None) -> None:
        self.calls.append(f"wake {tags}")


def test_a_sleeping_engine_gets_weights_before_it_generates() -> None:
    engine = FakeSleeper()
    phases = DevicePhases([engine], engines_sleep=True, training_sleeps=False)
    phases.start([])
    with pytest.raises(AssertionError, match="no weights"), phases.rollout():
        pass
    for enter in (phases.sync, phases.rollout, phases.rollout, phases.training):
        with enter():
            pass
    assert engine.calls == ["sleep", "wake ('weights',)", "wake ('kv_cache',)", "sleep"]
    assert phases.needs_weights


def test_without_sleep_nothing_is_called() -> None:
    engine = FakeSleeper()
    phases = DevicePhases([engine], engines_sleep=False, training_sleeps=False)
    phases.start([])
    with phases.rollout(), phases.training(), phases.sync():
        pass
    assert engine.calls == []
