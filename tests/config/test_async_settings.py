"""What asynchronous training can be combined with, and what is said about it."""

import pytest

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.trainer.ppo_run import run_ppo_local
from openrlhf.trainer.ppo_setup import planned_updates
from openrlhf.trainer.ray.placement import ClusterView, role_demands

NEEDS = "--pretrain m --prompt_data d --remote_rm_url r.py "


def parse(line):
    return parse_config(PPOConfig, (NEEDS + line).split())


def test_a_queue_size_of_the_environment_is_checked_alike(monkeypatch):
    monkeypatch.setenv("OPENRLHF_ASYNC_QUEUE_SIZE", "3")
    assert parse("--async_train").config.train.async_queue_size == 3
    assert parse("--async_train --async_queue_size 2").config.train.async_queue_size == 2
    monkeypatch.setenv("OPENRLHF_ASYNC_QUEUE_SIZE", "0")
    with pytest.raises(ConfigError, match="OPENRLHF_ASYNC_QUEUE_SIZE must be above 0: 0"):
        parse("--async_train")


def test_stale_samples_without_correction_are_said():
    (line,) = parse("--async_train --async_queue_size 2").notices
    assert "samples up to 2 update(s) old" in line and "--enable_vllm_is_correction" in line
    assert not parse("--async_train --enable_vllm_is_correction").notices


def test_colocation_is_of_the_trained_models_alone():
    config = parse(
        "--colocate_all_models --async_train --actor_num_gpus_per_node 4 "
        "--vllm_num_engines 2 --vllm_tensor_parallel_size 2"
    ).config
    cluster = ClusterView(num_gpus=8, num_cpus=64, max_gpus_per_node=8)
    pools = {demand.role: demand.pool for demand in role_demands(config, cluster)}
    assert pools["vllm"] not in (pools["actor"], pools["critic"], pools["ref"])
    assert pools["actor"] == pools["critic"] == pools["ref"]


@pytest.mark.parametrize(
    ("line", "take_turns"),
    [
        ("--colocate_all_models --async_train", True),
        ("--colocate_all_models", False),  # one thing after the other as it is
        ("--colocate_critic_reward --advantage_estimator gae --async_train", True),
        ("--colocate_critic_reward --advantage_estimator rloo --async_train", False),
        ("--colocate_actor_ref --async_train", False),
        ("--async_train", False),
    ],
)
def test_reward_models_on_devices_of_what_is_trained_take_turns_with_it(line, take_turns):
    assert parse(f"{line}").config.rewards_take_turns == take_turns


def test_steps_run_over_the_ends_of_episodes():
    line = "--rollout_batch_size 4 --train_batch_size 4 --micro_train_batch_size 2 --num_episodes 3"
    config = parse(f"{line} --micro_rollout_batch_size 2 --async_train").config
    assert planned_updates(config, num_prompts=6) == [1] * 5  # 4 + 4 + 4 + 4 + 2 prompts
    synchronous = parse(f"{line} --micro_rollout_batch_size 2").config
    assert len(planned_updates(synchronous, num_prompts=6)) == 6


def test_one_process_cannot_do_both():
    with pytest.raises(ConfigError, match="Use train_ppo_ray, or leave --async_train out"):
        run_ppo_local(parse("--async_train").config)
