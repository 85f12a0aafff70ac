#!/usr/bin/env bash
# PPO of a 70B policy on 48 GPUs of 80 GB: 16 each for the engines, the policy with its reference,
# and the critic with the reward model. Start a Ray cluster of six nodes first, or use train_ppo_llama_ray_slurm.sh.
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   NODES nodes of GPUS GPUs for policy and critic each;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-meta-llama/Meta-Llama-3-70B-Instruct}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
DATA=${DATA:-OpenRLHF/prompt-collection-v0.1}
INPUT_KEY=${INPUT_KEY:-context_messages}
OUT=${OUT:-./checkpoint/llama3-70b-ppo}
NODES=${NODES:-2}
GPUS=${GPUS:-8}
ENGINES=${ENGINES:-4}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-4}

python -m openrlhf.cli.train_ppo_ray \
    --ref_num_nodes "$NODES" --ref_num_gpus_per_node "$GPUS" \
    --reward_num_nodes "$NODES" --reward_num_gpus_per_node "$GPUS" \
    --critic_num_nodes "$NODES" --critic_num_gpus_per_node "$GPUS" \
    --actor_num_nodes "$NODES" --actor_num_gpus_per_node "$GPUS" \
    --vllm_num_engines "$ENGINES" --vllm_tensor_parallel_size "$TENSOR_PARALLEL" \
    --vllm_gpu_memory_utilization 0.9 \
    --colocate_critic_reward --colocate_actor_ref --ref_reward_offload \
    --pretrain "$MODEL" --reward_pretrain "$REWARD_MODEL" \
    --prompt_data "$DATA" --input_key "$INPUT_KEY" --apply_chat_template \
    --advantage_estimator gae --normalize_reward \
    --rollout_batch_size 1024 --micro_rollout_batch_size 4 \
    --train_batch_size 128 --micro_train_batch_size 2 \
    --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 \
    --max_samples 100000 --max_epochs 1 --num_episodes 1 \
    --prompt_max_len 1024 --generate_max_len 1024 \
    --zero_stage 3 --bf16 --adam_offload --flash_attn --gradient_checkpointing --packing_samples \
    --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
