#!/usr/bin/env bash
# Supervised fine-tuning on long dialogues: RING of the GPUS devices (CPU processes on a machine
# without GPUs) share every packed row.
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
DATA=${DATA:-THUDM/LongAlign-10k}
INPUT_KEY=${INPUT_KEY:-messages}
OUT=${OUT:-./checkpoint/llama3-8b-sft-ring}
GPUS=${GPUS:-8}
RING=${RING:-4}

torchrun --standalone --nproc_per_node "$GPUS" -m openrlhf.cli.train_sft \
    --pretrain "$MODEL" \
    --dataset "$DATA" \
    --input_key "$INPUT_KEY" ${OUTPUT_KEY:+--output_key "$OUTPUT_KEY"} \
    --apply_chat_template \
    --max_len 65536 \
    --train_batch_size 64 --micro_train_batch_size 1 \
    --max_epochs 1 \
    --learning_rate 5e-6 \
    --ring_attn_size "$RING" --ring_head_stride 2 \
    --zero_stage 3 --bf16 --flash_attn --packing_samples --gradient_checkpointing \
    --eval_steps -1 --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
