#!/usr/bin/env bash
# Iterative DPO: answer prompts several times, score, prefer the best answer to the worst and learn
# from such pairs; repeated on the next slice of the prompts with the model that came out.
#   MODEL, REWARD_MODEL, DATA name models and data (hub ids or local paths); OUT is the run folder;
#   GENERATE_ARGS, SCORE_ARGS, TRAIN_ARGS are appended to one step and win over what stands here.
# A script that was stopped goes on where it stopped. The steps are in offline_steps.sh.
set -euo pipefail
source "$(dirname "$0")/offline_steps.sh"

OUT=${OUT:-./checkpoint/llama3-8b-iter-dpo}
mkdir -p "$OUT"
policy=$MODEL
for ((i = 0; i < ITERATIONS; i++)); do
    answer "$policy" "$OUT/answers$i.jsonl" \
        --iter "$i" --rollout_batch_size "$PROMPTS" --best_of_n "$SAMPLES" \
        --seed "$i" --enable_prefix_caching
    score "$OUT/answers$i.jsonl" "$OUT/pairs$i.jsonl" --post_processor iter_dpo
    train train_dpo "$policy" "$OUT/pairs$i.jsonl" "$OUT/model$i" \
        --prompt_key prompt --beta 0.1 --learning_rate 5e-7 --zero_stage 3
    policy=$OUT/model$i
done
echo "last model: $policy"
