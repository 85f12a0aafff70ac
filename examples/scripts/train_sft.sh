#!/usr/bin/env bash
# Supervised fine-tuning on one machine with GPUS devices (0: one CPU process).
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B-Instruct}
DATA=${DATA:-Open-Orca/OpenOrca}
INPUT_KEY=${INPUT_KEY:-question}
OUTPUT_KEY=${OUTPUT_KEY:-response}
OUT=${OUT:-./checkpoint/llama3-8b-sft}
GPUS=${GPUS:-8}

launcher=(python -m)
if [ "$GPUS" -gt 1 ]; then
    launcher=(torchrun --standalone --nproc_per_node "$GPUS" -m)
fi

"${launcher[@]}" openrlhf.cli.train_sft \
    --pretrain "$MODEL" \
    --dataset "$DATA" \
    --input_key "$INPUT_KEY" --output_key "$OUTPUT_KEY" \
    --apply_chat_template \
    --max_len 2048 --max_samples 500000 \
    --train_batch_size 256 --micro_train_batch_size 2 \
    --max_epochs 1 \
    --learning_rate 5e-6 \
    --zero_stage 2 --bf16 --flash_attn --packing_samples --gradient_checkpointing \
    --eval_steps -1 --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
