#!/usr/bin/env bash
# The first steps of sums.sh, and the same with TRL, in turns; then a table of both.
#   OUT=runs/results/beside_trl   where everything is written    SEEDS="0 1 2"
#   STEPS=40   optimizer steps of a run    EVERY=5   steps between evaluations
#   MICRO_BATCH=32   of TRL
# Runs that are there are not made again. Nothing else should run meanwhile.
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/results/beside_trl}
STEPS=${STEPS:-40}
EVERY=${EVERY:-5}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

for seed in ${SEEDS:-0 1 2}; do
    run=$OUT/seed-$seed
    test -e "$run/rl/config.json" ||
        OUT=$run STEPS=$STEPS SEED=$seed ARGS="--eval_steps $EVERY" bash examples/results/sums.sh
    test -e "$run/trl/done" || {
        python examples/results/sums_trl.py "$run" "$STEPS" "$seed" "${MICRO_BATCH:-32}" "$EVERY" |
            tee "$run/trl.log"
        touch "$run/trl/done"
    }
    # What TRL made is asked as sums.sh asks our model.
    test -e "$run/eval/report.html" || python -m openrlhf.cli.main eval \
        "$(ls -dm "$run"/trl/step-* | tr -d ' \n')" --param_dtype bf16 --vllm_num_engines 0 \
        --eval_dataset "$run/held_out.jsonl" --input_key question --label_key answer \
        --apply_chat_template --prompt_max_len 64 --generate_max_len 16 \
        --micro_rollout_batch_size 128 --eval_n_samples_per_prompt 1 --seed "$seed" \
        --remote_rm_url examples/results/sums_reward.py --save_path "$run/eval"
done
python examples/results/trl_table.py "$OUT"
