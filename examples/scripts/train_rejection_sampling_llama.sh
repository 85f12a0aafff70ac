#!/usr/bin/env bash
# Rejection sampling: answer prompts several times, keep the best by a reward model, learn from
# them; repeated on the next slice of the prompts with the model that came out.
#   MODEL, REWARD_MODEL, DATA name models and data (hub ids or local paths); OUT is the run folder;
#   GENERATE_ARGS, SCORE_ARGS, TRAIN_ARGS are appended to one step and win over what stands here.
# A script that was stopped goes on where it stopped. The steps are in offline_steps.sh.
set -euo pipefail
source "$(dirname "$0")/offline_steps.sh"

OUT=${OUT:-./checkpoint/llama3-8b-rejection}
mkdir -p "$OUT"
policy=$MODEL
for ((i = 0; i < ITERATIONS; i++)); do
    answer "$policy" "$OUT/answers$i.jsonl" \
        --iter "$i" --rollout_batch_size "$PROMPTS" --best_of_n "$SAMPLES" \
        --seed "$i" --enable_prefix_caching
    score "$OUT/answers$i.jsonl" "$OUT/best$i.jsonl" --post_processor rs
    train train_sft "$policy" "$OUT/best$i.jsonl" "$OUT/model$i" \
        --input_key input --output_key output --learning_rate 2e-6 --zero_stage 3
    policy=$OUT/model$i
done
echo "last model: $policy"
