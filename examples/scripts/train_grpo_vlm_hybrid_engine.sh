#!/usr/bin/env bash
# GRPO of a vision-language model, hybrid engine: rows with images, a reward function, a frozen tower.
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}
DATA=${DATA:-hiyouga/geometry3k}
INPUT_KEY=${INPUT_KEY:-problem}
LABEL_KEY=${LABEL_KEY:-answer}
IMAGE_KEY=${IMAGE_KEY:-images}
REWARD_FUNC=${REWARD_FUNC:-$(dirname "$0")/../python/math_reward_func.py}
OUT=${OUT:-./checkpoint/qwen2.5-vl-7b-grpo}
GPUS=${GPUS:-8}
ENGINES=${ENGINES:-8}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}

python -m openrlhf.cli.train_ppo_ray \
    --colocate_all_models \
    --ref_num_nodes 1 --ref_num_gpus_per_node "$GPUS" \
    --actor_num_nodes 1 --actor_num_gpus_per_node "$GPUS" \
    --vllm_num_engines "$ENGINES" --vllm_tensor_parallel_size "$TENSOR_PARALLEL" \
    --vllm_gpu_memory_utilization 0.5 --vllm_enable_sleep --deepspeed_enable_sleep \
    --pretrain "$MODEL" --freeze_visual_encoder --remote_rm_url "$REWARD_FUNC" \
    --prompt_data "$DATA" --input_key "$INPUT_KEY" --label_key "$LABEL_KEY" \
    --image_key "$IMAGE_KEY" --image_max_pixels 1003520 \
    --advantage_estimator group_norm --n_samples_per_prompt 8 \
    --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 \
    --rollout_batch_size 128 --micro_rollout_batch_size 8 \
    --train_batch_size 512 --micro_train_batch_size 4 \
    --actor_learning_rate 1e-6 \
    --max_samples 100000 --max_epochs 1 --num_episodes 1 \
    --prompt_max_len 2048 --generate_max_len 2048 \
    --zero_stage 3 --bf16 --gradient_checkpointing \
    --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
