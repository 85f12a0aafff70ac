#!/usr/bin/env bash
# The classic pipeline on two CPU cores, nothing downloaded: supervised fine-tuning, a reward model
# from preferences, PPO with critic and reference. Each step starts from what the last one wrote.
#   OUT=runs/pipeline   where everything is written        SEED=0   of model, data and training
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/pipeline}
if [ -x .venv/bin/python ]; then PATH=$PWD/.venv/bin:$PATH; fi
SEED=${SEED:-0}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false} HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

echo "[1/4] model and data -> $OUT"
rm -rf "$OUT"
python examples/python/make_pipeline.py "$OUT" --seed "$SEED"

echo "[2/4] supervised fine-tuning"
python -m openrlhf.cli.train_sft \
    --pretrain "$OUT/model" --dataset "$OUT/sft.jsonl" \
    --input_key question --output_key answer --apply_chat_template \
    --max_len 32 --max_epochs 1 --train_batch_size 128 --micro_train_batch_size 128 \
    --learning_rate 3e-3 --logging_steps 10 --seed "$SEED" \
    --save_path "$OUT/sft"

echo "[3/4] reward model"
python -m openrlhf.cli.train_rm \
    --pretrain "$OUT/sft" --dataset "$OUT/pairs.jsonl" --eval_dataset "$OUT/held_out_pairs.jsonl" \
    --prompt_key question --chosen_key chosen --rejected_key rejected --apply_chat_template \
    --max_len 32 --max_epochs 2 --train_batch_size 64 --micro_train_batch_size 64 \
    --learning_rate 2e-3 --logging_steps 10 --seed "$SEED" \
    --save_path "$OUT/rm"

echo "[4/4] PPO"
python -m openrlhf.cli.train_ppo_ray \
    --pretrain "$OUT/sft" --reward_pretrain "$OUT/rm" --normalize_reward \
    --prompt_data "$OUT/prompts.jsonl" --input_key question --apply_chat_template \
    --advantage_estimator gae --init_kl_coef 0.01 \
    --rollout_batch_size 64 --micro_rollout_batch_size 64 --n_samples_per_prompt 1 \
    --train_batch_size 32 --micro_train_batch_size 32 --max_samples 512 --num_episodes 2 \
    --prompt_max_len 16 --generate_max_len 10 \
    --actor_learning_rate 1e-3 --critic_learning_rate 2e-3 \
    --colocate_all_models --vllm_num_engines 1 --enforce_eager --seed "$SEED" \
    --save_path "$OUT/ppo"
