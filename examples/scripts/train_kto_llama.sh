#!/usr/bin/env bash
# Preference optimisation on single answers, each good or bad, with GPUS devices (0: one CPU
# process). A row has a prompt, an answer and a label, 1 or 0.
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
DATA=${DATA:-Dylan2048/ultrafeedback-unpaired-preferences}
INPUT_KEY=${INPUT_KEY:-instruction}
OUTPUT_KEY=${OUTPUT_KEY:-response}
LABEL_KEY=${LABEL_KEY:-score}
OUT=${OUT:-./checkpoint/llama3-8b-kto}
GPUS=${GPUS:-8}

launcher=(python -m)
if [ "$GPUS" -gt 1 ]; then
    launcher=(torchrun --standalone --nproc_per_node "$GPUS" -m)
fi

"${launcher[@]}" openrlhf.cli.train_kto \
    --pretrain "$MODEL" \
    --dataset "$DATA" \
    --input_key "$INPUT_KEY" --output_key "$OUTPUT_KEY" --label_key "$LABEL_KEY" \
    --max_len 1024 \
    --train_batch_size 128 --micro_train_batch_size 2 \
    --max_epochs 1 \
    --beta 0.1 --desirable_loss_weight 1.0 --undesirable_loss_weight 1.0 \
    --learning_rate 5e-7 \
    --zero_stage 3 --bf16 --flash_attn --packing_samples --gradient_checkpointing \
    --eval_steps -1 --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
