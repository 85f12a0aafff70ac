#!/usr/bin/env bash
# REINFORCE++-baseline with a reward function, hybrid engine: group mean as baseline, no critic.
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
DATA=${DATA:-openai/gsm8k@main}
INPUT_KEY=${INPUT_KEY:-question}
LABEL_KEY=${LABEL_KEY:-answer}
REWARD_FUNC=${REWARD_FUNC:-$(dirname "$0")/../python/math_reward_func.py}
OUT=${OUT:-./checkpoint/llama3-8b-reinforce-baseline}
GPUS=${GPUS:-8}
ENGINES=${ENGINES:-4}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-2}

python -m openrlhf.cli.train_ppo_ray \
    --colocate_all_models \
    --ref_num_nodes 1 --ref_num_gpus_per_node "$GPUS" \
    --actor_num_nodes 1 --actor_num_gpus_per_node "$GPUS" \
    --vllm_num_engines "$ENGINES" --vllm_tensor_parallel_size "$TENSOR_PARALLEL" \
    --vllm_gpu_memory_utilization 0.6 --vllm_enable_sleep --deepspeed_enable_sleep \
    --pretrain "$MODEL" --remote_rm_url "$REWARD_FUNC" \
    --prompt_data "$DATA" --input_key "$INPUT_KEY" --label_key "$LABEL_KEY" --apply_chat_template \
    --advantage_estimator reinforce_baseline --n_samples_per_prompt 8 \
    --init_kl_coef 1e-5 --use_kl_loss --kl_estimator k2 \
    --rollout_batch_size 128 --micro_rollout_batch_size 16 \
    --train_batch_size 1024 --micro_train_batch_size 8 \
    --actor_learning_rate 5e-7 \
    --max_samples 100000 --max_epochs 1 --num_episodes 1 \
    --prompt_max_len 1024 --generate_max_len 1024 \
    --zero_stage 3 --bf16 --flash_attn --gradient_checkpointing --packing_samples \
    --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
