#!/usr/bin/env bash
# REINFORCE++ on groups of GPUS devices: policy and reference, reward model, engines.
# --advantage_estimator reinforce_baseline, rloo or group_norm in EXTRA_ARGS: its relatives.
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
DATA=${DATA:-OpenRLHF/prompt-collection-v0.1}
INPUT_KEY=${INPUT_KEY:-context_messages}
OUT=${OUT:-./checkpoint/llama3-8b-reinforce}
GPUS=${GPUS:-2}
ENGINES=${ENGINES:-2}

python -m openrlhf.cli.train_ppo_ray \
    --ref_num_nodes 1 --ref_num_gpus_per_node "$GPUS" \
    --reward_num_nodes 1 --reward_num_gpus_per_node "$GPUS" \
    --actor_num_nodes 1 --actor_num_gpus_per_node "$GPUS" \
    --vllm_num_engines "$ENGINES" --vllm_tensor_parallel_size 1 \
    --colocate_actor_ref \
    --pretrain "$MODEL" --reward_pretrain "$REWARD_MODEL" \
    --prompt_data "$DATA" --input_key "$INPUT_KEY" --apply_chat_template \
    --advantage_estimator reinforce --normalize_reward \
    --rollout_batch_size 1024 --micro_rollout_batch_size 16 \
    --train_batch_size 128 --micro_train_batch_size 4 \
    --actor_learning_rate 5e-7 --init_kl_coef 0.01 \
    --max_samples 100000 --max_epochs 1 --num_episodes 1 \
    --prompt_max_len 1024 --generate_max_len 1024 \
    --zero_stage 3 --bf16 --adam_offload --flash_attn --gradient_checkpointing --packing_samples \
    --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
