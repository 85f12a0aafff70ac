"""PPO whose models and engine share one GPU in turns; needs Ray, vLLM and DeepSpeed."""

import os
from pathlib import Path

import pytest
import transformers

from openrlhf.utils.tracker import read_metrics
from tests.gpu.engines import DEVICES
from tests.integration.commands import PPO_HYBRID, argv, run_command
from tests.tiny import make_model, make_reward_model, write_jsonl


@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", DEVICES)
def test_a_hybrid_run_takes_turns_on_one_device_and_agrees_with_its_engine(
    tmp_path: Path, device: str
) -> None:
    rows = [{"context_messages": [{"role": "user", "content": f"{i}+1="}]} for i in range(24)]
    words = argv(
        PPO_HYBRID,
        pretrain=make_model(tmp_path / "model", hidden_size=128),
        reward_pretrain=make_reward_model(tmp_path / "reward", hidden_size=128),
        prompt_data=write_jsonl(tmp_path / "prompts.jsonl", rows),
        eval_dataset=tmp_path / "prompts.jsonl",
        vllm_gpu_memory_utilization="0.3",
        actor_learning_rate="1e-3",
        save_path=tmp_path / "run",
        ckpt_path=tmp_path / "ckpt",
        save_steps="2",
    )
    visible = {"CUDA_VISIBLE_DEVICES": "0"} if device == "cuda" else {}
    run_command("-m", "openrlhf.cli.train_ppo_ray", *words, env=os.environ | visible, timeout=840)
    steps = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "policy_loss" in r]
    assert len(steps) == 3
    # The weights of every step reached the engine, asleep before and awake after.
    assert all(step["vllm_kl"] < 0.1 and step["ratio_max"] < 2 for step in steps)
    # Moves of states are copies: Python's garbage is not searched for each of them. On a GPU the
    # engine's memory takes its time, too.
    assert 0 < min(step["moving_s"] for step in steps) < (0.5 if device == "cpu" else 5)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert exported.config.hidden_size == 128
    assert (tmp_path / "ckpt" / "global_step2").is_dir()
