"""The commands in users' documents parse as they stand there."""

from __future__ import annotations

import shlex

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.serving import BatchInferenceConfig, LoraCombinerConfig
from openrlhf.config.supervised import DPOConfig, RMConfig, SFTConfig

GRPO = r"""
--advantage_estimator group_norm --ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes \
1 --reward_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
--vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models --pretrain \
OpenRLHF/Llama-3-8b-sft-mixture --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k --save_path \
./output/llama3-8b-grpo --micro_train_batch_size 8 --train_batch_size 128 \
--micro_rollout_batch_size 16 --rollout_batch_size 1024 --max_epochs 1 --bf16 \
--actor_learning_rate 5e-7 --init_kl_coef 0.01 --use_kl_loss --kl_estimator k3 \
--normalize_reward --no_advantage_std_norm
"""

README_PPO = r"""
--ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8 \
--critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node \
8 --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models \
--vllm_gpu_memory_utilization 0.5 --pretrain OpenRLHF/Llama-3-8b-sft-mixture --reward_pretrain \
OpenRLHF/Llama-3-8b-rm-700k --save_path /openrlhf/examples/test_scripts/final/llama3-8b-rlhf \
--ckpt_path /openrlhf/examples/test_scripts/ckpt/llama3-8b-rlhf --save_hf_ckpt \
--micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 \
--rollout_batch_size 1024 --n_samples_per_prompt 1 --max_epochs 1 --prompt_max_len 1024 \
--max_samples 100000 --generate_max_len 1024 --zero_stage 3 --bf16 --actor_learning_rate 5e-7 \
--critic_learning_rate 9e-6 --init_kl_coef 0.01 --prompt_data OpenRLHF/prompt-collection-v0.1 \
--input_key context_messages --apply_chat_template --normalize_reward --gradient_checkpointing \
--packing_samples --vllm_sync_backend nccl --enforce_eager --vllm_enable_sleep \
--deepspeed_enable_sleep --use_wandb {wandb_token}
"""

CHEAT_SHEET = r"""
--pretrain Qwen/Qwen2.5-7B-Instruct --reward_pretrain OpenRLHF/Llama-3-8b-rm-mixture \
--advantage_estimator group_norm --vllm_num_engines 2 --vllm_tensor_parallel_size 1 \
--actor_num_gpus_per_node 4 --colocate_actor_ref --prompt_data your/prompts --input_key prompt \
--save_path ./ckpt --use_wandb $WANDB_API_KEY
"""

SFT = r"""
--max_len 4096 --dataset Open-Orca/OpenOrca --input_key question --output_key response \
--input_template 'User: {}
Assistant: ' --train_batch_size 256 --micro_train_batch_size 2 --max_samples 500000 --pretrain \
meta-llama/Meta-Llama-3-8B --save_path ./checkpoint/llama3-8b-sft --save_steps -1 \
--logging_steps 1 --eval_steps -1 --zero_stage 2 --max_epochs 1 --packing_samples --bf16 \
--flash_attn --learning_rate 5e-6 --gradient_checkpointing --use_wandb {wandb_token} 
"""

RM = r"""
--save_path ./checkpoint/llama3-8b-rm --save_steps -1 --logging_steps 1 --eval_steps -1 \
--train_batch_size 256 --micro_train_batch_size 1 --pretrain OpenRLHF/Llama-3-8b-sft-mixture \
--bf16 --max_epochs 1 --max_len 8192 --zero_stage 3 --learning_rate 9e-6 --dataset \
OpenRLHF/preference_dataset_mixture2_and_safe_pku --apply_chat_template --chosen_key chosen \
--rejected_key rejected --flash_attn --packing_samples --gradient_checkpointing --use_wandb \
{wandb_token}
"""

DPO = r"""
--save_path ./output/llama3-8b-dpo --save_steps -1 --logging_steps 1 --eval_steps -1 \
--train_batch_size 256 --micro_train_batch_size 2 --pretrain meta-llama/Meta-Llama-3-8B --bf16 \
--max_epochs 1 --max_len 8192 --zero_stage 3 --learning_rate 5e-7 --beta 0.1 --dataset \
OpenRLHF/preference_dataset_mixture2_and_safe_pku --apply_chat_template --chosen_key chosen \
--rejected_key rejected --flash_attn --gradient_checkpointing
"""

LORA_COMBINER = r"""
--model_path meta-llama/Meta-Llama-3-8B --lora_path ./checkpoint/llama3-8b-rm --output_path \
./checkpoint/llama-3-8b-rm-combined --is_rm --bf16
"""

REWARD_FUNCTION = "--remote_rm_url /path/to/reward_func.py --label_key answer"
PROMPTS = " --prompt_data your/prompts"


def parse(config_class, command):
    parsed = parse_config(config_class, shlex.split(command.replace("\\\n", " ")))
    return parsed.config


def test_the_ppo_command_with_group_norm_makes_eight_samples_of_a_prompt():
    config = parse(
        PPOConfig,
        README_PPO.replace("--n_samples_per_prompt 1", "") + " --advantage_estimator group_norm",
    )
    assert config.rollout.n_samples_per_prompt == 8


def test_the_grpo_command():
    config = parse(PPOConfig, GRPO + PROMPTS)
    advantage, kl = config.algo.advantage, config.algo.kl
    assert (advantage.estimator, advantage.no_std_norm) == ("group_norm", True)
    assert (kl.init_coef, kl.use_loss, kl.estimator) == (0.01, True, "k3")
    assert (config.rollout.batch_size, config.rollout.n_samples_per_prompt) == (1024, 8)
    assert not config.has_critic


def test_the_ppo_command_of_the_readme():
    config = parse(PPOConfig, README_PPO)
    for role in (config.actor, config.critic, config.ref, config.reward):
        assert (role.num_nodes, role.num_gpus_per_node) == (1, 8)
    assert (config.vllm.num_engines, config.vllm.tensor_parallel_size) == (4, 2)
    assert (config.train.micro_batch_size, config.train.batch_size) == (8, 128)
    assert (config.rollout.micro_batch_size, config.rollout.batch_size) == (16, 1024)
    assert (config.ds.zero_stage, config.ds.param_dtype, config.ds.enable_sleep) == (
        3,
        "bf16",
        True,
    )
    assert (config.actor.adam.lr, config.critic.adam.lr) == (5e-7, 9e-6)
    assert config.actor.gradient_checkpointing_enable
    assert config.critic.gradient_checkpointing_enable
    assert config.ckpt.save_hf
    assert config.ckpt.path == "/openrlhf/examples/test_scripts/ckpt/llama3-8b-rlhf"
    assert (config.data.input_key, config.data.apply_chat_template) == ("context_messages", True)
    assert config.data.max_samples == 100_000
    assert (config.vllm.sync_backend, config.vllm.enforce_eager) == ("nccl", True)
    assert config.logger.wandb.key == "true"


def test_the_command_of_the_french_cheat_sheet():
    for typed in (CHEAT_SHEET, CHEAT_SHEET.replace("$WANDB_API_KEY", "")):
        config = parse(PPOConfig, typed)
        assert config.actor.num_gpus_per_node == 4
        assert config.ref.num_gpus_per_node == 4  # shares the actor's
        assert config.train.colocate_actor_ref
        assert config.vllm.num_engines == 2
        assert config.rollout.n_samples_per_prompt == 8
        assert config.data.input_key == "prompt"
        assert config.logger.wandb.key == "true"


def test_a_reward_function_in_the_place_of_a_reward_model():
    config = parse(PPOConfig, f"--pretrain m {REWARD_FUNCTION} {PROMPTS}")
    assert config.reward.remote_url == "/path/to/reward_func.py"
    assert config.data.label_key == "answer"


def test_the_sft_command():
    config = parse(SFTConfig, SFT)
    assert config.data.dataset == "Open-Orca/OpenOrca"
    assert (config.data.input_key, config.data.output_key) == ("question", "response")
    assert config.data.input_template == "User: {}\nAssistant: "
    assert (config.data.max_len, config.data.max_samples) == (4096, 500_000)
    assert (config.train.batch_size, config.train.micro_batch_size) == (256, 2)
    assert config.train.max_epochs == 1
    assert config.model.model_name_or_path == "meta-llama/Meta-Llama-3-8B"
    assert config.model.gradient_checkpointing_enable
    assert config.ckpt.output_dir == "./checkpoint/llama3-8b-sft"
    assert (config.ckpt.save_steps, config.eval.steps, config.logger.logging_steps) == (-1, -1, 1)
    assert (config.ds.zero_stage, config.ds.param_dtype) == (2, "bf16")
    assert config.ds.attn_implementation == "flash_attention_2"
    assert config.ds.packing_samples
    assert config.adam.lr == 5e-6


def test_the_reward_model_command():
    config = parse(RMConfig, RM + " --value_prefix_head score")
    assert config.model.model_name_or_path == "OpenRLHF/Llama-3-8b-sft-mixture"
    assert (config.train.batch_size, config.train.micro_batch_size) == (256, 1)
    assert (config.data.chosen_key, config.data.rejected_key) == ("chosen", "rejected")
    assert (config.data.max_len, config.data.prompt_key) == (8192, None)
    assert (config.adam.lr, config.ds.zero_stage) == (9e-6, 3)
    assert (config.ds.value_head_prefix, config.ds.param_dtype) == ("score", "bf16")
    assert (config.model.loss_type, config.logger.wandb.project) == ("sigmoid", "openrlhf_train_rm")


def test_the_dpo_command():
    config = parse(DPOConfig, DPO)
    assert (config.model.beta, config.model.loss_type) == (0.1, "sigmoid")
    assert (config.adam.lr, config.train.micro_batch_size) == (5e-7, 2)
    assert config.data.apply_chat_template
    assert config.ref.model_name_or_path is None
    assert config.ckpt.output_dir == "./output/llama3-8b-dpo"


def test_the_lora_combiner_command():
    config = parse(LoraCombinerConfig, LORA_COMBINER)
    assert config.model_path == "meta-llama/Meta-Llama-3-8B"
    assert config.lora_path == "./checkpoint/llama3-8b-rm"
    assert config.output_path == "./checkpoint/llama-3-8b-rm-combined"
    assert (config.is_rm, config.ds.param_dtype) == (True, "bf16")


def test_the_commands_of_a_round_of_rejection_sampling():
    generate = parse(
        BatchInferenceConfig,
        "--eval_task generate_vllm --pretrain m --bf16 --max_new_tokens 2048 --prompt_max_len 2048 "
        "--dataset p --dataset_probs 1.0 --input_key prompt --temperature 0.9 --zero_stage 0 "
        "--best_of_n 4 --enable_prefix_caching --tp_size 2 --max_num_seqs 64 --iter 0 "
        "--rollout_batch_size 2048 --output_path ./g.jsonl",
    )
    assert (generate.rollout.iter, generate.rollout.best_of_n) == (0, 4)
    assert list(generate.notices()) == []
    score = parse(
        BatchInferenceConfig,
        "--eval_task rm --pretrain r --bf16 --max_len 4096 --dataset ./g.jsonl --dataset_probs 1.0 "
        "--zero_stage 0 --post_processor rs --micro_batch_size 4 --output_path ./r.jsonl",
    )
    assert (score.reward.post_processor, score.micro_batch_size) == ("rs", 4)
    assert list(score.notices()) == []
