#!/usr/bin/env bash
# Adapters on a mixture of experts, with the router's balancing loss, on GPUS devices (0: one CPU
# process). OUT holds the adapter; openrlhf merge-lora merges it into its base.
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-mistralai/Mixtral-8x7B-v0.1}
DATA=${DATA:-Open-Orca/OpenOrca}
INPUT_KEY=${INPUT_KEY:-question}
OUTPUT_KEY=${OUTPUT_KEY:-response}
OUT=${OUT:-./checkpoint/mixtral-sft-lora}
GPUS=${GPUS:-8}

launcher=(python -m)
if [ "$GPUS" -gt 1 ]; then
    launcher=(torchrun --standalone --nproc_per_node "$GPUS" -m)
fi

"${launcher[@]}" openrlhf.cli.train_sft \
    --pretrain "$MODEL" \
    --dataset "$DATA" \
    --input_key "$INPUT_KEY" --output_key "$OUTPUT_KEY" \
    --max_len 2048 --max_samples 500000 \
    --lora_rank 64 --lora_alpha 64 --aux_loss_coef 0.001 \
    --train_batch_size 128 --micro_train_batch_size 4 \
    --max_epochs 1 \
    --learning_rate 5e-6 \
    --zero_stage 3 --bf16 --flash_attn --packing_samples --gradient_checkpointing \
    --eval_steps -1 --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
