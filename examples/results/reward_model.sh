#!/usr/bin/env bash
# SmolLM2-135M-Instruct becomes a reward model for sums, and PPO with a critic trains the model with it.
#   OUT=runs/results/reward_model   where everything is written       SEED=0
#   PAIRS=4000   of the reward model      STEPS=60   of PPO      ARGS="…"   flags of PPO that come last
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/results/reward_model}
STEPS=${STEPS:-60}
PAIRS=${PAIRS:-4000}
MODEL=models/smollm2-135m
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

test -e "$MODEL/README.md" || make real-model
python examples/results/make_sums.py "$OUT" $((16 * STEPS))
test -e "$OUT/samples.jsonl" || python -m openrlhf.cli.main infer \
    --eval_task generate_vllm --pretrain "$MODEL" --dataset "$OUT/prompts.jsonl" \
    --input_key question --apply_chat_template --prompt_max_len 64 --max_new_tokens 16 \
    --best_of_n 4 --max_samples $((PAIRS / 8)) --seed "${SEED:-0}" --output_path "$OUT/samples.jsonl"
python examples/results/make_pairs.py "$OUT" "$PAIRS"

test -e "$OUT/rm/config.json" || python -m openrlhf.cli.main rm \
    --pretrain "$MODEL" --param_dtype bf16 --dataset "$OUT/pairs.jsonl" \
    --eval_dataset "$OUT/held_out_pairs.jsonl" --prompt_key question --apply_chat_template \
    --max_len 128 --train_batch_size 64 --micro_train_batch_size 32 --learning_rate 3e-5 \
    --seed "${SEED:-0}" --save_path "$OUT/rm"
python -m openrlhf.cli.main ppo-local \
    --pretrain "$MODEL" --reward_pretrain "$OUT/rm" --critic_pretrain "$OUT/rm" \
    --param_dtype bf16 --prompt_data "$OUT/prompts.jsonl" --input_key question \
    --apply_chat_template --advantage_estimator gae --init_kl_coef 0.02 --n_samples_per_prompt 8 \
    --rollout_batch_size 16 --micro_rollout_batch_size 128 \
    --train_batch_size 128 --micro_train_batch_size 32 \
    --prompt_max_len 64 --generate_max_len 16 --temperature 1.0 --vllm_num_engines 0 \
    --actor_learning_rate 3e-5 --critic_learning_rate 3e-5 \
    --lr_scheduler cosine_with_min_lr --lr_warmup_ratio 0.05 \
    --seed "${SEED:-0}" --save_path "$OUT/rl" ${ARGS:-}
python -m openrlhf.cli.main eval "$MODEL,$OUT/rl" \
    --eval_dataset "$OUT/held_out.jsonl" --input_key question --label_key answer \
    --apply_chat_template --prompt_max_len 64 --generate_max_len 16 \
    --eval_n_samples_per_prompt 1 --remote_rm_url examples/results/sums_reward.py \
    --save_path "$OUT/eval"
