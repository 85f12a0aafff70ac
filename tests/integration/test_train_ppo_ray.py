"""The documents' RL commands on real Ray, vLLM and DeepSpeed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from openrlhf.cli import train_ppo_ray
from openrlhf.models.loading import load_causal_lm
from openrlhf.rollout.rollout import RolloutMaker, SampleBatch
from openrlhf.utils.rollout import Rollout
from tests.integration.commands import PPO_HYBRID, argv, steps_of

pytestmark = pytest.mark.usefixtures("ray_cluster")


ON_TWO_RANKS = "--ring_attn_size 2 " + " ".join(
    f"--{role}_num_gpus_per_node 2" for role in ("actor", "critic", "ref", "reward")
)


@pytest.mark.parametrize(
    "extra",
    ["", pytest.param(ON_TWO_RANKS, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
    ids=["one rank", "shared rows"],
)
def test_ppo_in_hybrid_mode(
    tiny_model_dir: Path,
    reward_model_dir: Path,
    critic_dir: Path,
    prompt_file: Path,
    tmp_path: Path,
    extra: str,
) -> None:
    train_ppo_ray.main(
        argv(
            f"{PPO_HYBRID} {extra}",
            pretrain=tiny_model_dir,
            reward_pretrain=reward_model_dir,
            critic_pretrain=critic_dir,
            prompt_data=prompt_file,
            save_path=tmp_path / "run",
            ckpt_path=tmp_path / "ckpt",
        )
    )
    first, last = steps_of(tmp_path / "run")
    assert {"policy_loss", "critic_loss", "values", "kl", "return", "critic_lr"} <= first.keys()
    assert last["timing/step_total"] > 0
    assert first["ratio_max"] == 1.0
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert exported.dtype == torch.bfloat16
    assert (tmp_path / "run" / "chat_template.jinja").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "estimator", "flags"),
    [
        ("tiny_tied_model_dir", "dr_grpo", "--vllm_num_engines 2"),
        ("tiny_model_dir", "rloo", "--ring_attn_size 2 --vllm_sync_with_ray"),
        # What reaches the engine is merged, out of the parts that two ranks hold.
        ("tiny_model_dir", "reinforce", "--lora_rank 4 --zero_stage 3"),
        ("two_key_heads_dir", "group_norm", "--ds_tensor_parallel_size 2"),
        ("tiny_model_dir", "reinforce_baseline", "--vllm_tensor_parallel_size 2"),
    ],
)
def test_two_ranks_stay_in_sync_with_their_engines(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    estimator: str,
    flags: str,
    given: dict,
) -> None:
    answers: dict[str, list[Rollout]] = {}
    generate = RolloutMaker.generate_samples

    def noted(self: RolloutMaker, prompts: Any, sampling: Any, *, tag: str) -> SampleBatch:
        batch = generate(self, prompts, sampling, tag=tag)
        answers[tag] = batch.rollouts
        return batch

    monkeypatch.setattr(RolloutMaker, "generate_samples", noted)
    train_ppo_ray.main(
        argv(
            f"--advantage_estimator {estimator} --init_kl_coef 0 --actor_num_gpus_per_node 2 "
            f"--vllm_num_engines 1 {flags} --num_episodes 2 --actor_learning_rate 1e-3 "
            "--enable_prefix_caching --use_dynamic_batch",
            **given | {"pretrain": request.getfixturevalue(model)},
            n_samples_per_prompt="2",
            train_batch_size="16",
            eval_dataset=given["prompt_data"],
            eval_temperature="0",
            eval_n_samples_per_prompt="1",
        )
    )
    records = steps_of(given["save_path"])
    assert len(records) == 4
    # Weights have moved by then; a stale engine would show. A step whose rewards are all equal
    # trains on nothing and compares nothing.
    compared = [record for record in records if "vllm_kl" in record]
    assert len(compared) >= 2
    assert all(record["vllm_kl"] < 1e-6 for record in compared)
    assert all(record["logprobs_diff_max"] < 1e-3 for record in compared)
    assert compared[0]["ratio_max"] == 1.0
    # What both engines answer greedily at the end is what Hugging Face answers with the export.
    policy = load_causal_lm(given["save_path"])
    assert len(answers["eval4"]) == 11
    for rollout in answers["eval4"]:
        prompt = rollout.token_ids[: -rollout.num_actions]
        greedy = policy.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            do_sample=False,
            max_new_tokens=rollout.num_actions,
        )
        assert greedy[0].tolist() == rollout.token_ids.tolist()
