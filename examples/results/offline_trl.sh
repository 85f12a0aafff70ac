#!/usr/bin/env bash
# SFT and DPO of offline.sh, and the same with TRL, in turns; then a table of both.
#   OUT=runs/results/offline_trl   where everything is written    SEEDS="0 1 2"
#   SAMPLES=runs/results/offline/samples.jsonl   what to learn from, made if it is not there
#   MICRO_BATCH=8   of TRL
# Models that are there are not made again. Nothing else should run meanwhile.
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/results/offline_trl}
SAMPLES=${SAMPLES:-runs/results/offline/samples.jsonl}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

for seed in ${SEEDS:-0 1 2}; do
    run=$OUT/seed-$seed
    mkdir -p "$run"
    test -e "$run/samples.jsonl" || { test -e "$SAMPLES" && cp "$SAMPLES" "$run"; } || true
    test -e "$run/eval/report.html" ||
        METHODS="sft dpo" OUT=$run SEED=$seed bash examples/results/offline.sh
    SAMPLES=$run/samples.jsonl
    for kind in sft dpo; do
        test -e "$run/trl-$kind/model.safetensors" ||
            python examples/results/offline_trl.py "$run" $kind "$seed" "${MICRO_BATCH:-8}" |
            tee "$run/trl-$kind.log"
    done
    # What TRL made is asked as offline.sh asks our models.
    test -e "$run/eval-trl/report.html" || python -m openrlhf.cli.main eval \
        "$run/trl-sft,$run/trl-dpo" --eval_dataset "$run/held_out.jsonl" \
        --input_key question --label_key answer --apply_chat_template --prompt_max_len 64 \
        --generate_max_len 48 --eval_n_samples_per_prompt 1 \
        --remote_rm_url examples/results/sums_reward.py --save_path "$run/eval-trl"
done
python examples/results/offline_trl_table.py "$OUT"
