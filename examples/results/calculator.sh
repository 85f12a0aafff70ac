#!/usr/bin/env bash
# An agent: SmolLM2-135M-Instruct learns to use a calculator for products that it cannot compute.
#   OUT=runs/results/calculator   where everything is written      SEED=0   of the run
#   STEPS=60   optimizer steps      ARGS="…"   flags that come last
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/results/calculator}
STEPS=${STEPS:-60}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

test -e models/smollm2-135m/README.md || make real-model
python examples/results/make_products.py "$OUT" $((16 * STEPS))
python -m openrlhf.cli.main ppo-local \
    --pretrain models/smollm2-135m --param_dtype bf16 \
    --prompt_data "$OUT/prompts.jsonl" \
    --input_key question --label_key answer --apply_chat_template \
    --agent_func_path examples/results/calculator.py \
    --advantage_estimator group_norm --n_samples_per_prompt 8 --init_kl_coef 0 \
    --rollout_batch_size 16 --micro_rollout_batch_size 128 \
    --train_batch_size 128 --micro_train_batch_size 32 \
    --prompt_max_len 96 --generate_max_len 96 --temperature 1.0 --vllm_num_engines 1 \
    --actor_learning_rate 3e-5 --lr_scheduler cosine_with_min_lr --lr_warmup_ratio 0.05 \
    --eval_dataset "$OUT/held_out.jsonl" --eval_steps 15 --eval_n_samples_per_prompt 1 \
    --seed "${SEED:-0}" --save_path "$OUT/rl" ${ARGS:-}

python -m openrlhf.cli.report "$OUT/rl"
python examples/results/answers.py "$OUT/rl"
