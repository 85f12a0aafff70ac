"""The lines an RL run opens with: every model with its place, the rewards, the true batch."""

from types import SimpleNamespace
from typing import Any

import torch

from openrlhf.commands.rl_inputs import planned_updates
from openrlhf.commands.train_rl import banner_sections
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.trainer.ppo_utils.demands import ClusterView, role_demands

LAPTOP = ClusterView(num_gpus=0, num_cpus=2, max_gpus_per_node=0)
NODE = ClusterView(num_gpus=8, num_cpus=64, max_gpus_per_node=8)
SIZES = {"actor": 3_300_000, "ref": 3_300_000, "reward1": 950, "reward2": 950, "critic": 7_200_000}


def banner(
    flags: str, cluster: ClusterView, num_prompts: int = 100
) -> tuple[dict[str, object], dict[str, object]]:
    """The sections of a command's banner: models, run."""
    line = f"--pretrain /m/policy --prompt_data d --save_path out {flags}"
    config = parse_config(PPOConfig, line.split()).config
    demands = role_demands(config, cluster)
    placed: Any = SimpleNamespace(demands=demands, view=cluster, policy_dtype=torch.float32)
    sizes = {demand.role: SIZES[demand.role] for demand in demands if demand.role in SIZES}
    updates = planned_updates(config, num_prompts)
    inputs: Any = SimpleNamespace(
        updates=updates,
        prompts=range(num_prompts),
        eval_prompts=range(5),
        eval_sampling=SimpleNamespace(num_samples=4),
    )
    sections = banner_sections(config, inputs, placed, sizes)
    return dict(sections["models"]), dict(sections["run"])


def test_every_model_is_named_with_its_size_its_ranks_and_its_place() -> None:
    models, run = banner(
        "--reward_pretrain /m/a,/m/b --reward_weights 1 0.5 --colocate_actor_ref "
        "--actor_num_gpus_per_node 2 --critic_num_gpus_per_node 1 --reward_num_gpus_per_node 1 "
        "--vllm_num_engines 1 --vllm_tensor_parallel_size 2",
        NODE,
    )
    assert models == {
        "actor": "/m/policy: 3.3M parameters, 2 rank(s), devices: actor",
        "ref": "/m/policy: 3.3M parameters, 2 rank(s), devices: actor",
        "reward1": "/m/a: 950 parameters, 1 rank(s), devices: reward1",
        "reward2": "/m/b: 950 parameters, 1 rank(s), devices: reward2",
        "critic": "/m/a: 7.2M parameters, 1 rank(s), devices: critic",
        "generation": "1 x vLLM of 2 device(s) each, devices: vllm",
    }
    assert run["reward"] == "/m/a, /m/b"
    assert run["devices"] == "8 GPU(s), 64 core(s)"
    assert run["evaluation"] == "5 prompts x 4 samples"


def test_a_set_smaller_than_the_batch_is_what_a_step_takes() -> None:
    line = "--remote_rm_url r.py --advantage_estimator rloo --n_samples_per_prompt 2 "
    line += "--rollout_batch_size 8 --train_batch_size 8"
    for num_prompts, batch, steps in (
        (4, "4 prompts x 2 samples = 8; 1 update(s) of 8 samples a step", "1 (4 prompts"),
        (11, "8 prompts x 2 samples = 16; 2 update(s) of 8 samples a step", "2 (11 prompts"),
        (
            7,
            "7 prompts x 2 samples = 14; 2 update(s) of 8 samples a step, the last of 6",
            "1 (7 prompts",
        ),
    ):
        _, run = banner(line, LAPTOP, num_prompts)
        assert run["batch"] == batch
        assert run["steps"] == f"{steps} x 1 episode(s))"
