#!/usr/bin/env bash
# Direct preference optimisation of long pairs: RING of the GPUS devices (CPU processes on a machine
# without GPUs) share every packed row. MODE is ring or ulysses.
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
DATA=${DATA:-OpenRLHF/preference_dataset_mixture2_and_safe_pku}
CHOSEN_KEY=${CHOSEN_KEY:-chosen}
REJECTED_KEY=${REJECTED_KEY:-rejected}
OUT=${OUT:-./checkpoint/llama3-8b-dpo-ring}
GPUS=${GPUS:-8}
RING=${RING:-2}
MODE=${MODE:-ring}

torchrun --standalone --nproc_per_node "$GPUS" -m openrlhf.cli.train_dpo \
    --pretrain "$MODEL" \
    --dataset "$DATA" \
    --chosen_key "$CHOSEN_KEY" --rejected_key "$REJECTED_KEY" \
    --apply_chat_template \
    --max_len 32768 \
    --train_batch_size 256 --micro_train_batch_size 1 \
    --max_epochs 1 \
    --beta 0.1 \
    --learning_rate 5e-7 \
    --ring_attn_size "$RING" --ring_head_stride 2 --cp_mode "$MODE" \
    --zero_stage 3 --bf16 --flash_attn --packing_samples --gradient_checkpointing \
    --eval_steps -1 --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
