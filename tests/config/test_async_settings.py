"""What asynchronous training can be combined with, and what is said about it."""

from __future__ import annotations

import pytest

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.trainer.ppo_run import run_ppo_local
from openrlhf.trainer.ppo_setup import planned_updates
from openrlhf.trainer.ppo_trainer_async import async_limits
from openrlhf.trainer.ray.placement import ClusterView, role_counts

NEEDS = "--pretrain m --prompt_data d --remote_rm_url r.py --rollout_batch_size 64 "


def parse(line):
    return parse_config(PPOConfig, (NEEDS + line).split())


def test_a_queue_size_of_the_environment_is_checked_alike(monkeypatch):
    monkeypatch.setenv("OPENRLHF_ASYNC_QUEUE_SIZE", "3")
    assert async_limits(parse("--train_batch_size 64 --async_train").config).max_staleness == 3
    typed = parse("--train_batch_size 64 --async_train --async_queue_size 2").config
    assert async_limits(typed).max_staleness == 2  # the flag wins
    monkeypatch.setenv("OPENRLHF_ASYNC_QUEUE_SIZE", "0")
    with pytest.raises(ConfigError, match="OPENRLHF_ASYNC_QUEUE_SIZE must be above 0: 0"):
        parse("--train_batch_size 64 --async_train")


def test_flags_are_the_limits_of_the_queue():
    def limits(line):
        return async_limits(parse(f"--train_batch_size 64 --async_train {line}").config)

    plain = limits("")
    assert (plain.batch_size, plain.max_staleness) == (64, 1)
    assert (plain.max_running, plain.keeps_running) == (64, False)
    partial = limits("--async_queue_size 2 --partial_rollout")
    assert (partial.max_staleness, partial.keeps_running) == (2, True)
    assert limits("--vllm_generate_batch_size 96").max_running == 96
    # No more prompts are on their way than can be trained on in time.
    late = limits("--async_queue_size 2 --vllm_generate_batch_size 193")
    assert late.max_outstanding == 192


def test_stale_samples_without_correction_are_said():
    (line,) = parse("--train_batch_size 64 --async_train --async_queue_size 2").notices
    assert "samples up to 2 update(s) old" in line and "--enable_vllm_is_correction" in line
    assert not parse("--train_batch_size 64 --async_train --enable_vllm_is_correction").notices


def test_colocation_is_of_the_trained_models_alone():
    config = parse(
        "--train_batch_size 64 --colocate_all_models --async_train --actor_num_gpus_per_node 4 "
        "--vllm_num_engines 2 --vllm_tensor_parallel_size 2"
    ).config
    cluster = ClusterView(num_gpus=8, num_cpus=64, max_gpus_per_node=8)
    counts = role_counts(config, cluster)
    pools = {demand.role: demand.pool for demand in counts.demands}
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
    assert parse(f"--train_batch_size 64 {line}").config.rewards_take_turns == take_turns


def test_steps_run_over_the_ends_of_episodes():
    line = "--rollout_batch_size 4 --train_batch_size 4 --micro_train_batch_size 2 --num_episodes 3"
    config = parse(f"{line} --micro_rollout_batch_size 2 --async_train").config
    assert planned_updates(config, num_prompts=6) == [1] * 5  # 4 + 4 + 4 + 4 + 2 prompts
    synchronous = parse(f"{line} --micro_rollout_batch_size 2").config
    assert len(planned_updates(synchronous, num_prompts=6)) == 6


def test_one_process_cannot_do_both():
    with pytest.raises(ConfigError, match="Use train_ppo_ray, or leave --async_train out"):
        run_ppo_local(parse("--train_batch_size 64 --async_train").config)
