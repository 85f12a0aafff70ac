#!/usr/bin/env bash
# DAPO with a reward function, hybrid engine (arXiv 2503.14476): groups without a signal are replaced,
# the upper clip range is wider, answers near the length limit lose reward, no KL, token-level loss.
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   OVERLONG_BUFFER is how many tokens before the limit the penalty begins;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-openai/gsm8k@main}
INPUT_KEY=${INPUT_KEY:-question}
LABEL_KEY=${LABEL_KEY:-answer}
REWARD_FUNC=${REWARD_FUNC:-$(dirname "$0")/../python/math_reward_func.py}
OVERLONG_BUFFER=${OVERLONG_BUFFER:-1024}
OUT=${OUT:-./checkpoint/qwen2.5-7b-dapo}
GPUS=${GPUS:-8}
ENGINES=${ENGINES:-4}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-2}

python -m openrlhf.cli.train_ppo_ray \
    --colocate_all_models \
    --actor_num_nodes 1 --actor_num_gpus_per_node "$GPUS" \
    --vllm_num_engines "$ENGINES" --vllm_tensor_parallel_size "$TENSOR_PARALLEL" \
    --vllm_gpu_memory_utilization 0.6 --vllm_enable_sleep --deepspeed_enable_sleep \
    --pretrain "$MODEL" --remote_rm_url "$REWARD_FUNC" \
    --prompt_data "$DATA" --input_key "$INPUT_KEY" --label_key "$LABEL_KEY" --apply_chat_template \
    --advantage_estimator group_norm --n_samples_per_prompt 8 \
    --dynamic_filtering --dynamic_filtering_reward_range 0 1 \
    --eps_clip_low_high 0.2 0.28 --loss_aggregation token_mean --init_kl_coef 0 \
    --overlong_buffer_len "$OVERLONG_BUFFER" --overlong_penalty_factor 1.0 \
    --rollout_batch_size 128 --micro_rollout_batch_size 16 \
    --train_batch_size 256 --use_dynamic_batch \
    --actor_learning_rate 1e-6 \
    --max_samples 100000 --max_epochs 1 --num_episodes 1 \
    --prompt_max_len 1024 --generate_max_len 4096 \
    --zero_stage 3 --bf16 --flash_attn --gradient_checkpointing \
    --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
