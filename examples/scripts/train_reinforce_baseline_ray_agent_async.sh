#!/usr/bin/env bash
# REINFORCE++-baseline with agents, asynchronous: episodes act beside the engines while others train.
# The rewards of agent_func.py are random: it shows where code goes. Name an agent of your own.
#   MODEL, DATA, AGENT, ... name models, data and code; OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
DATA=${DATA:-openai/gsm8k@main}
INPUT_KEY=${INPUT_KEY:-question}
LABEL_KEY=${LABEL_KEY:-answer}
AGENT=${AGENT:-$(dirname "$0")/../python/agent_func.py}
OUT=${OUT:-./checkpoint/llama3-8b-reinforce-baseline-agent-async}
GPUS=${GPUS:-4}
ENGINES=${ENGINES:-4}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}

python -m openrlhf.cli.train_ppo_ray \
    --async_train --async_queue_size 1 --async_num_tasks 128 --agent_func_path "$AGENT" \
    --enable_vllm_is_correction --is_correction_type tis \
    --colocate_all_models \
    --ref_num_nodes 1 --ref_num_gpus_per_node "$GPUS" \
    --actor_num_nodes 1 --actor_num_gpus_per_node "$GPUS" \
    --vllm_num_engines "$ENGINES" --vllm_tensor_parallel_size "$TENSOR_PARALLEL" \
    --vllm_gpu_memory_utilization 0.9 --deepspeed_enable_sleep \
    --pretrain "$MODEL" \
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
