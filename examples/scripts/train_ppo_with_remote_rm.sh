#!/usr/bin/env bash
# PPO against reward servers that run already, hybrid engine; a server of this package is started by
#   openrlhf serve-rm --reward_pretrain MODEL --port 5000 --normalize_reward --bf16
#   REWARD_URL is its address, or those of several with commas between;
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_URL=${REWARD_URL:-http://localhost:5000/get_reward}
DATA=${DATA:-OpenRLHF/prompt-collection-v0.1}
INPUT_KEY=${INPUT_KEY:-context_messages}
OUT=${OUT:-./checkpoint/llama3-8b-ppo-remote-rm}
GPUS=${GPUS:-8}
ENGINES=${ENGINES:-4}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-2}

python -m openrlhf.cli.train_ppo_ray \
    --colocate_all_models \
    --ref_num_nodes 1 --ref_num_gpus_per_node "$GPUS" \
    --critic_num_nodes 1 --critic_num_gpus_per_node "$GPUS" \
    --actor_num_nodes 1 --actor_num_gpus_per_node "$GPUS" \
    --vllm_num_engines "$ENGINES" --vllm_tensor_parallel_size "$TENSOR_PARALLEL" \
    --vllm_gpu_memory_utilization 0.5 --vllm_enable_sleep --deepspeed_enable_sleep \
    --pretrain "$MODEL" --remote_rm_url "$REWARD_URL" \
    --prompt_data "$DATA" --input_key "$INPUT_KEY" --apply_chat_template \
    --advantage_estimator gae \
    --rollout_batch_size 1024 --micro_rollout_batch_size 16 \
    --train_batch_size 128 --micro_train_batch_size 8 \
    --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 \
    --max_samples 100000 --max_epochs 1 --num_episodes 1 \
    --prompt_max_len 1024 --generate_max_len 1024 \
    --zero_stage 3 --bf16 --flash_attn --gradient_checkpointing --packing_samples \
    --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
