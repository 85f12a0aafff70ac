#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns when to use a calculator: SFT on 400 dialogues, half of which do, then
# GRPO on episodes that are paid for the right sum of two numbers of three or four digits.
#   OUT=runs/results/calculator   where everything is written       SEED=0   STEPS=15
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/results/calculator}
STEPS=${STEPS:-15}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

test -e models/smollm2-135m/README.md || make real-model
python examples/results/make_calculations.py "$OUT" $((16 * STEPS))
test -e "$OUT/sft/config.json" || python -m openrlhf.cli.main sft \
    --pretrain models/smollm2-135m --param_dtype bf16 --dataset "$OUT/dialogues.jsonl" \
    --input_key messages --apply_chat_template --multiturn --max_len 128 \
    --train_batch_size 32 --micro_train_batch_size 32 --learning_rate 5e-5 --max_epochs 3 \
    --seed "${SEED:-0}" --save_path "$OUT/sft"
python -m openrlhf.cli.main ppo-local \
    --pretrain "$OUT/sft" --param_dtype bf16 \
    --prompt_data "$OUT/prompts.jsonl" \
    --input_key question --label_key answer --apply_chat_template \
    --agent_func_path examples/results/calculator_agent.py \
    --advantage_estimator group_norm --n_samples_per_prompt 8 --init_kl_coef 0 \
    --rollout_batch_size 16 --micro_rollout_batch_size 128 \
    --train_batch_size 128 --micro_train_batch_size 32 \
    --prompt_max_len 64 --generate_max_len 96 --temperature 1.0 --vllm_num_engines 0 \
    --actor_learning_rate 2e-5 --lr_scheduler cosine_with_min_lr --lr_warmup_ratio 0.05 \
    --eval_dataset "$OUT/held_out.jsonl" --eval_steps 5 --eval_n_samples_per_prompt 1 \
    --seed "${SEED:-0}" --save_path "$OUT/rl" ${ARGS:-}

python -m openrlhf.cli.report "$OUT/rl"
python examples/results/answers.py "$OUT/rl"
