#!/usr/bin/env bash
# Conditional SFT: score answers, write the scores into the prompts, learn all of them, and later
# ask for a high score with --enable_csft (batch_inference, interactive_chat).
#   MODEL, REWARD_MODEL, DATA name models and data (hub ids or local paths); OUT is the run folder;
#   SCORE_ARGS, TRAIN_ARGS are appended to one step and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-mixture}
DATA=${DATA:-Open-Orca/OpenOrca}
INPUT_KEY=${INPUT_KEY:-question}
OUTPUT_KEY=${OUTPUT_KEY:-response}
OUT=${OUT:-./checkpoint/llama3-8b-csft}
GPUS=${GPUS:-8}
FORMAT=${FORMAT:---apply_chat_template}

launcher=(python -m)
if [ "$GPUS" -gt 1 ]; then
    launcher=(torchrun --standalone --nproc_per_node "$GPUS" -m)
fi

mkdir -p "$OUT"
if [ ! -f "$OUT/scored.jsonl" ]; then
    "${launcher[@]}" openrlhf.cli.batch_inference \
        --eval_task rm --pretrain "$REWARD_MODEL" \
        --dataset "$DATA" --input_key "$INPUT_KEY" --output_key "$OUTPUT_KEY" $FORMAT \
        --max_len 2048 --micro_batch_size 8 --bf16 \
        --post_processor csft --normalize_reward \
        --output_path "$OUT/scored.jsonl" \
        ${SCORE_ARGS:-}
fi
"${launcher[@]}" openrlhf.cli.train_sft \
    --pretrain "$MODEL" \
    --dataset "$OUT/scored.jsonl" --input_key input --output_key output $FORMAT \
    --max_len 2048 --train_batch_size 128 --micro_train_batch_size 2 \
    --max_epochs 1 --learning_rate 5e-6 \
    --zero_stage 2 --bf16 --gradient_checkpointing \
    --save_path "$OUT/model" --ckpt_path "$OUT/model/checkpoints" \
    ${TRAIN_ARGS:-}
