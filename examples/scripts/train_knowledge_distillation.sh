#!/usr/bin/env bash
# A student learns the distributions of a larger teacher of the same vocabulary, with GPUS devices
# (0: one CPU process). For answers of the student itself: EXTRA_ARGS="--kd_on_policy --zero_stage 2".
#   MODEL, TEACHER, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-meta-llama/Llama-2-7b-hf}
TEACHER=${TEACHER:-meta-llama/Llama-2-13b-chat-hf}
DATA=${DATA:-Open-Orca/OpenOrca}
INPUT_KEY=${INPUT_KEY:-question}
OUTPUT_KEY=${OUTPUT_KEY:-response}
OUT=${OUT:-./checkpoint/llama2-7b-kd}
GPUS=${GPUS:-8}

launcher=(python -m)
if [ "$GPUS" -gt 1 ]; then
    launcher=(torchrun --standalone --nproc_per_node "$GPUS" -m)
fi

"${launcher[@]}" openrlhf.cli.train_kd \
    --pretrain "$MODEL" \
    --teacher_model "$TEACHER" --teacher_offload \
    --dataset "$DATA" \
    --input_key "$INPUT_KEY" --output_key "$OUTPUT_KEY" \
    --max_len 2048 --max_samples 500000 \
    --train_batch_size 256 --micro_train_batch_size 2 \
    --max_epochs 1 \
    --kd_coef 0.4 \
    --learning_rate 5e-6 \
    --zero_stage 3 --bf16 --flash_attn --packing_samples --gradient_checkpointing \
    --eval_steps -1 --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
