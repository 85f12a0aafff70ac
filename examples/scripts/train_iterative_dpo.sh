#!/usr/bin/env bash
# Iterative DPO: answer prompts several times, score, prefer the best answer to the worst and learn
# from such pairs; repeated on the next slice of the prompts with the model that came out.
#   MODEL, REWARD_MODEL, DATA name models and data (hub ids or local paths); OUT is the run folder;
#   GENERATE_ARGS, SCORE_ARGS, TRAIN_ARGS are appended to one step and win over what stands here.
# A script that was stopped goes on where it stopped.
set -euo pipefail

MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B-Instruct}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-mixture}
DATA=${DATA:-OpenRLHF/prompt-collection-v0.1}
INPUT_KEY=${INPUT_KEY:-context_messages}
OUT=${OUT:-./checkpoint/llama3-8b-iter-dpo}
ITERATIONS=${ITERATIONS:-4}
PROMPTS=${PROMPTS:-2048}
SAMPLES=${SAMPLES:-4}
GPUS=${GPUS:-8}
ENGINE=${ENGINE:-generate_vllm}
FORMAT=${FORMAT:---apply_chat_template}

launcher=(python -m)
if [ "$GPUS" -gt 1 ]; then
    launcher=(torchrun --standalone --nproc_per_node "$GPUS" -m)
fi

policy=$MODEL
mkdir -p "$OUT"
for ((i = 0; i < ITERATIONS; i++)); do
    if [ ! -f "$OUT/answers$i.jsonl" ]; then
        python -m openrlhf.cli.batch_inference \
            --eval_task "$ENGINE" --pretrain "$policy" \
            --dataset "$DATA" --input_key "$INPUT_KEY" $FORMAT \
            --iter "$i" --rollout_batch_size "$PROMPTS" --best_of_n "$SAMPLES" \
            --prompt_max_len 1024 --max_new_tokens 1024 --temperature 1.0 \
            --seed "$i" --enable_prefix_caching \
            --output_path "$OUT/answers$i.jsonl" \
            ${GENERATE_ARGS:-}
    fi
    if [ ! -f "$OUT/pairs$i.jsonl" ]; then
        "${launcher[@]}" openrlhf.cli.batch_inference \
            --eval_task rm --pretrain "$REWARD_MODEL" \
            --dataset "$OUT/answers$i.jsonl" $FORMAT \
            --max_len 2048 --micro_batch_size 8 --bf16 --post_processor iter_dpo \
            --output_path "$OUT/pairs$i.jsonl" \
            ${SCORE_ARGS:-}
    fi
    if [ ! -f "$OUT/model$i/config.json" ]; then
        "${launcher[@]}" openrlhf.cli.train_dpo \
            --pretrain "$policy" \
            --dataset "$OUT/pairs$i.jsonl" --prompt_key prompt $FORMAT \
            --max_len 2048 --train_batch_size 128 --micro_train_batch_size 2 \
            --max_epochs 1 --beta 0.1 --learning_rate 5e-7 \
            --zero_stage 3 --bf16 --gradient_checkpointing \
            --save_path "$OUT/model$i" --ckpt_path "$OUT/model$i/checkpoints" \
            ${TRAIN_ARGS:-}
    fi
    policy=$OUT/model$i
done
echo "last model: $policy"
