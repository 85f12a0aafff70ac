"""How roles are counted, placed and described, without a cluster."""

import shlex
from collections.abc import Callable
from contextlib import nullcontext
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from openrlhf.config.cli import parse_config
from openrlhf.config.generation import AgentsConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import (
    ConfigError,
    LostRankError,
    NoRestartError,
    NumericsError,
    OpenRLHFError,
)
from openrlhf.trainer.device_phases import DevicePhases
from openrlhf.trainer.local_cluster import Cluster
from openrlhf.trainer.ppo_utils.demands import (
    ClusterView,
    RoleDemand,
    check_demand,
    demand_table,
    pool_sizes,
    role_demands,
    sharing_one_machine,
)
from openrlhf.trainer.ray import placement
from tests.helpers.documented import CHEAT_SHEET, GRPO, README_PPO

LAPTOP = ClusterView(num_gpus=0, num_cpus=2, max_gpus_per_node=0)
NODE = ClusterView(num_gpus=8, num_cpus=64, max_gpus_per_node=8)


def demands(cluster: ClusterView, **sections: dict) -> list[RoleDemand]:
    config = PPOConfig.model_validate(
        {"actor": {"model_name_or_path": "m"}, "reward": {"model_name_or_path": "r"}} | sections
    )
    return role_demands(config, cluster)


def ranks(found: list[RoleDemand]) -> dict[str, int]:
    return {demand.role: demand.num_ranks for demand in found}


def test_every_reward_model_has_a_group_of_its_own_or_shares_the_critics_place() -> None:
    several = {"model_name_or_path": "a, b"}
    apart = demands(LAPTOP, reward=several)
    roles = ("actor", "ref", "reward1", "reward2", "critic", "vllm")
    assert ranks(apart) == dict.fromkeys(roles, 1)
    pools = {demand.role: demand.pool for demand in apart}
    assert (pools["reward1"], pools["reward2"]) == ("reward1", "reward2")
    shared = demands(LAPTOP, reward=several, train={"colocate_critic_reward": True})
    pools = {demand.role: demand.pool for demand in shared}
    assert {pools["reward1"], pools["reward2"], pools["critic"]} == {"critic"}


@pytest.mark.parametrize(
    ("view", "sections", "expected"),
    [
        (NODE, {}, True),
        (NODE, {"train": {"colocate_all": True}}, False),
        (LAPTOP, {}, False),
    ],
    ids=["own GPUs", "shared GPUs", "cores"],
)
def test_policy_and_critic_are_updated_at_once_on_gpus_of_their_own(
    view: ClusterView, sections: dict, expected: bool
) -> None:
    cluster = Cluster(demands(view, **sections), view, torch.bfloat16, {}, [])
    assert cluster.updates_side_by_side == expected


def test_colocated_roles_share_bundles() -> None:
    found = demands(NODE, train={"colocate_all": True}, vllm={"tensor_parallel_size": 2})
    assert ranks(found)["vllm"] == 4
    assert pool_sizes(found) == {"shared by all": 8}
    apart = demands(NODE, train={"colocate_actor_ref": True, "colocate_critic_reward": True})
    assert pool_sizes(apart) == {"actor": 8, "critic": 8, "vllm": 8}


def demands_of(cluster: ClusterView, *commands: str) -> list[RoleDemand]:
    """The demand of a command of the documents, with flags of its own behind it."""
    words = [word for part in commands for word in shlex.split(part.replace("\\\n", " "))]
    config = parse_config(PPOConfig, words).config
    return role_demands(config, cluster)


def test_the_cheat_sheet_fits_a_node_and_its_reference_shares_the_actors_gpus() -> None:
    found = demands_of(NODE, CHEAT_SHEET)
    assert {"actor": 4, "ref": 4, "reward": 2}.items() <= ranks(found).items()
    assert pool_sizes(found) == {"actor": 4, "reward": 2, "vllm": 2}  # reward takes what is left
    check_demand(found, NODE)


@pytest.mark.parametrize("command", [README_PPO, GRPO])
def test_the_hybrid_commands_of_the_documents_fill_a_node(command: str) -> None:
    for cluster in (NODE, LAPTOP):
        found = demands_of(cluster, command, "--prompt_data your/prompts")
        assert {role: count for role, count in ranks(found).items() if count != 8} == {"vllm": 4}
        assert pool_sizes(found) == {"shared by all": 8}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--colocate_actor_ref --ref_num_gpus_per_node 3", {"actor": 3, "ref": 3}),
        ("--colocate_actor_ref --actor_num_nodes 2 --actor_num_gpus_per_node 4", {"ref": 8}),
        ("--colocate_critic_reward --reward_num_gpus_per_node 2", {"critic": 2, "reward2": 2}),
        ("--colocate_all_models --critic_num_gpus_per_node 4", {"actor": 4, "reward1": 4}),
    ],
)
def test_a_partner_without_a_shape_takes_the_others(flags: str, expected: dict[str, int]) -> None:
    base = "--pretrain m --prompt_data d --reward_pretrain a,b --vllm_num_engines 1"
    for cluster in (NODE, LAPTOP):
        assert expected.items() <= ranks(demands_of(cluster, base, flags)).items()


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_models_that_nobody_placed_share_the_gpus_of_one_machine(num_gpus: int, caplog) -> None:
    machine = ClusterView(num_gpus=num_gpus, num_cpus=64, max_gpus_per_node=num_gpus)
    words = "--pretrain m --prompt_data p --remote_rm_url r.py --vllm_gpu_memory_utilization 0.6"
    config = sharing_one_machine(parse_config(PPOConfig, words.split()).config, lambda: machine)
    found = role_demands(config, machine)
    check_demand(found, machine)
    assert pool_sizes(found) == {"shared by all": num_gpus}
    assert config.vllm.enable_sleep and config.ds.enable_sleep
    assert config.vllm.gpu_memory_utilization == 0.6  # as it was typed
    assert (
        "--vllm.enable_sleep true --ds.enable_sleep true --vllm.gpu_memory_utilization 0.6"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("flags", "cluster"),
    [
        ("--actor_num_gpus_per_node 1", NODE),
        ("--vllm_num_engines 2", NODE),
        ("--async_train", NODE),
        ("", LAPTOP),
        ("", ClusterView(num_gpus=16, num_cpus=64, max_gpus_per_node=8)),
    ],
    ids=["ranks", "engines", "asynchronous", "no GPU", "two machines"],
)
def test_a_placement_that_somebody_made_stays(flags: str, cluster: ClusterView) -> None:
    words = f"--pretrain m --prompt_data p --remote_rm_url r.py {flags}"
    config = parse_config(PPOConfig, words.split()).config
    assert sharing_one_machine(config, lambda: cluster) is config


def test_too_large_a_demand_is_a_table_at_once() -> None:
    found = demands(NODE)
    with pytest.raises(ConfigError, match="need 40, have 8") as error:
        check_demand(found, NODE)
    assert "--colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep" in str(error.value)
    for role in ("actor", "ref", "reward", "critic", "vllm"):
        assert role in demand_table(found, NODE)


@pytest.mark.parametrize("num_roles", [2, 5, 6, 7])
def test_roles_that_share_a_gpu_fit_on_it_as_ray_counts(num_roles: int) -> None:
    assert num_roles * round(placement.share_of(num_roles) * 10_000) <= 10_000


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> ClusterView:
    """A cluster of two nodes, two GPUs and one, in which everything is placed at once."""
    cores = {"large": 192.0, "small": 24.0}
    bundles = {"bundles_to_node_id": {0: "large", 1: "large", 2: "small"}}
    placed = SimpleNamespace(wait=lambda seconds: True)
    nodes = [{"NodeID": name, "Resources": {"CPU": count}} for name, count in cores.items()]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr(placement, "placement_group", lambda *_, **options: placed)
    monkeypatch.setattr(placement, "placement_group_table", lambda _: bundles)
    return ClusterView(num_gpus=3, num_cpus=216, max_gpus_per_node=2)


BOTH = [RoleDemand("actor", 3, "all"), RoleDemand("vllm", 1, "all", bundles_per_rank=2)]


def test_threads_of_a_process_are_the_cores_of_its_node_over_the_processes_on_it(
    three_gpus: ClusterView,
) -> None:
    for num_roles_at_once, expected in ((1, [96, 96, 24]), (2, [48, 48, 12])):
        slots, _ = placement.place(BOTH, three_gpus, num_roles_at_once=num_roles_at_once)
        for role, of_role in (("actor", expected), ("vllm", expected[:1])):
            found = [slot["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] for slot in slots[role]]
            assert found == list(map(str, of_role))


def test_a_tensor_parallel_engine_leads_workers_on_shares_of_its_gpus(
    three_gpus: ClusterView,
) -> None:
    slots, _ = placement.place(BOTH, three_gpus, num_roles_at_once=1)
    [engine], share = slots["vllm"], slots["actor"][0]["num_gpus"]
    told = engine["runtime_env"]["env_vars"]
    assert (engine["num_gpus"], told["VLLM_RAY_BUNDLE_INDICES"]) == (0, "0,1")
    # All roles of a GPU together ask for no more than that GPU.
    assert 0 < 2 * float(told["VLLM_RAY_PER_WORKER_GPUS"]) == 2 * share <= 1


NO_ROOM = (
    r"no other had room for it in 6 s \(--node_wait_s\)\. Start one, or go on with fewer ranks: "
    "type fewer, and --load_checkpoint --use_ds_universal_ckpt"
)


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        ("CREATED", LostRankError, r"rank 0 did not start in 4 s \(--restart_timeout_s\)"),
        ("RESCHEDULING", NoRestartError, NO_ROOM),
    ],
)
def test_a_process_in_place_of_a_lost_one_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, state: str, error: type[Exception], said: str
) -> None:
    group = SimpleNamespace(placement_group="group")
    monkeypatch.setattr(placement, "placement_group_table", lambda _: {"state": state})
    monkeypatch.setattr(placement.ray, "wait", lambda references, timeout: ([], references))
    actor = SimpleNamespace(health=SimpleNamespace(remote=lambda: "health"))
    limits = AgentsConfig(restart_timeout_s=4, node_wait_s=6)
    with pytest.raises(error, match=said) as raised:
        placement.wait_for_node(actor, {"scheduling_strategy": group}, "rank 0", limits)
    assert raised.value.exit_code == 3


class FakeSleeper:
    """Notes what it is told."""

    is_up = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, method: Callable[..., None], *args: object) -> None:
        getattr(self, method.__name__)(*args)

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake_up(self, tag: str) -> None:
        self.calls.append(f"wake {tag}")


def test_a_sleeping_engine_gets_weights_before_it_generates() -> None:
    engine = FakeSleeper()
    phases = DevicePhases([engine], engines_sleep=True, training_sleeps=False)
    phases.sleep()
    with pytest.raises(AssertionError, match="no weights"), phases.rollout():
        pass
    for enter in (phases.sync, phases.rollout, phases.rollout, phases.training):
        with enter():
            pass
    assert engine.calls == ["sleep", "wake weights", "wake kv_cache", "sleep"]
    assert phases.needs_weights


def test_engines_sleep_and_wake_at_the_same_time() -> None:
    meeting = Barrier(3, timeout=20)  # broken when one engine waits for another

    class Engine(FakeSleeper):
        def sleep(self) -> None:
            meeting.wait()

        def wake_up(self, tag: str) -> None:
            meeting.wait()

    phases = DevicePhases([Engine() for _ in range(3)], engines_sleep=True, training_sleeps=False)
    phases.sleep()
    with phases.sync(), phases.rollout():
        pass


@pytest.mark.parametrize(
    ("error", "moves"),
    [
        (None, ["reload_states", "offload_states"]),
        (NumericsError("a loss is not finite"), ["reload_states", "offload_states"]),
        (OpenRLHFError("actor rank 0: a bug"), ["reload_states"]),
    ],
)
def test_nobody_waits_for_the_peers_of_a_rank_that_has_failed(error, moves) -> None:
    called: list[str] = []
    group = SimpleNamespace(call=lambda method: called.append(method.__name__))
    phases = DevicePhases([], engines_sleep=False, training_sleeps=True)
    with pytest.raises(type(error)) if error else nullcontext(), phases.update(group):
        if error:
            raise error
    assert called == moves
