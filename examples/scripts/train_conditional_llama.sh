#!/usr/bin/env bash
# Conditional SFT (arXiv 2308.12050): score answers, write the scores into the prompts, learn all of
# them, then ask for a high and for a low score and see that the reward follows.
#   MODEL, REWARD_MODEL, DATA name models and data (hub ids or local paths); OUT is the run folder;
#   SAMPLES=0: DATA has the answers, in OUTPUT_KEY; above 0: MODEL gives so many to each prompt;
#   HIGH, LOW: the scores to ask for, in standard deviations from the mean;
#   GENERATE_ARGS, SCORE_ARGS, TRAIN_ARGS are appended to one step and win over what stands here.
# A script that was stopped goes on where it stopped. The steps are in offline_steps.sh.
set -euo pipefail
MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B-Instruct}
DATA=${DATA:-Open-Orca/OpenOrca}
INPUT_KEY=${INPUT_KEY:-question}
SAMPLES=${SAMPLES:-0}
source "$(dirname "$0")/offline_steps.sh"

OUTPUT_KEY=${OUTPUT_KEY:-response}
OUT=${OUT:-./checkpoint/llama3-8b-csft}
HIGH=${HIGH:-1.50}
LOW=${LOW:--1.50}
mkdir -p "$OUT"

rows=$DATA
if [ "$SAMPLES" -gt 0 ]; then
    answer "$MODEL" "$OUT/answers.jsonl" --best_of_n "$SAMPLES" --enable_prefix_caching
    rows=$OUT/answers.jsonl INPUT_OF_ROWS=input OUTPUT_KEY=output
fi
# --csft_prompt below is the same text: the model must find the score where it learnt it.
score "$rows" "$OUT/scored.jsonl" \
    --input_key "${INPUT_OF_ROWS:-$INPUT_KEY}" --output_key "$OUTPUT_KEY" \
    --post_processor csft --normalize_reward --reward_template "{input} <rm_score>: {reward} "
train train_sft "$MODEL" "$OUT/scored.jsonl" "$OUT/model" \
    --input_key input --output_key output --learning_rate 5e-6 --zero_stage 2
for wish in high low; do
    wanted=$HIGH
    if [ "$wish" = low ]; then wanted=$LOW; fi
    answer "$OUT/model" "$OUT/$wish.jsonl" \
        --max_samples 512 --enable_csft --csft_prompt "<rm_score>: $wanted"
    echo "asked for $wanted standard deviations:"
    score "$OUT/$wish.jsonl" "$OUT/${wish}_scored.jsonl"
done
