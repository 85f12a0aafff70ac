#!/usr/bin/env bash
# A process reward model that judges each step of a solution, with GPUS devices (0: one CPU
# process). A row has a text in which MARKER ends every step, and a list of labels, one a step.
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-mistralai/Mistral-7B-v0.1}
DATA=${DATA:-zhuzilin/Math-Shepherd}
INPUT_KEY=${INPUT_KEY:-input}
LABEL_KEY=${LABEL_KEY:-value}
MARKER=${MARKER:-ки}
OUT=${OUT:-./checkpoint/mistral-7b-prm}
GPUS=${GPUS:-8}

launcher=(python -m)
if [ "$GPUS" -gt 1 ]; then
    launcher=(torchrun --standalone --nproc_per_node "$GPUS" -m)
fi

"${launcher[@]}" openrlhf.cli.train_prm \
    --pretrain "$MODEL" \
    --dataset "$DATA" \
    --input_key "$INPUT_KEY" --label_key "$LABEL_KEY" \
    --placeholder_token "$MARKER" --reward_tokens + - \
    --max_len 8192 \
    --train_batch_size 256 --micro_train_batch_size 8 \
    --max_epochs 1 \
    --learning_rate 1e-6 \
    --zero_stage 3 --bf16 --flash_attn --packing_samples --gradient_checkpointing \
    --eval_steps -1 --save_steps 100 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
