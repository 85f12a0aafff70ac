#!/usr/bin/env bash
# A reward model from pairs of answers with GPUS devices (0: one CPU process). A row has a better
# and a worse answer, whole dialogues both; with a column for the prompt, say --prompt_key in
# EXTRA_ARGS. The model that is saved knows mean and spread of its scores.
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B-Instruct}
DATA=${DATA:-OpenRLHF/preference_dataset_mixture2_and_safe_pku}
CHOSEN_KEY=${CHOSEN_KEY:-chosen}
REJECTED_KEY=${REJECTED_KEY:-rejected}
OUT=${OUT:-./checkpoint/llama3-8b-rm}
GPUS=${GPUS:-8}

launcher=(python -m)
if [ "$GPUS" -gt 1 ]; then
    launcher=(torchrun --standalone --nproc_per_node "$GPUS" -m)
fi

"${launcher[@]}" openrlhf.cli.train_rm \
    --pretrain "$MODEL" \
    --dataset "$DATA" \
    --chosen_key "$CHOSEN_KEY" --rejected_key "$REJECTED_KEY" \
    --apply_chat_template \
    --max_len 8192 \
    --train_batch_size 256 --micro_train_batch_size 1 \
    --max_epochs 1 \
    --learning_rate 9e-6 \
    --zero_stage 3 --bf16 --flash_attn --packing_samples --gradient_checkpointing \
    --eval_steps -1 --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
