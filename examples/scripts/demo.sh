#!/usr/bin/env bash
# The whole system in a few minutes on two CPU cores, nothing downloaded: a tiny model is made and
# warmed up, GRPO trains it with a reward function, held-out problems are tried before and after.
#   OUT=runs/demo   where everything is written        SEED=0   of model, data and training
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/demo}
SEED=${SEED:-0}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false} HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export HF_HUB_DISABLE_PROGRESS_BARS=${HF_HUB_DISABLE_PROGRESS_BARS:-1}

echo "[1/4] model and data -> $OUT"
rm -rf "$OUT"
python examples/python/make_demo.py "$OUT" --seed "$SEED"

echo "[2/4] warm-up: supervised fine-tuning"
python -m openrlhf.cli.train_sft \
    --pretrain "$OUT/model" \
    --dataset "$OUT/warm_up.jsonl" \
    --input_key question --output_key answer --apply_chat_template \
    --max_len 32 --max_epochs 1 \
    --train_batch_size 256 --micro_train_batch_size 256 \
    --learning_rate 2e-3 --lr_warmup_ratio 0.05 \
    --logging_steps 20 --seed "$SEED" \
    --save_path "$OUT/sft" --ckpt_path "$OUT/sft/checkpoints"

echo "[3/4] GRPO: 32 prompts x 8 samples a step"
python -m openrlhf.cli.train_ppo_ray \
    --pretrain "$OUT/sft" \
    --prompt_data "$OUT/prompts.jsonl" --max_samples 960 \
    --input_key question --label_key answer --apply_chat_template \
    --remote_rm_url examples/python/demo_reward.py \
    --advantage_estimator group_norm --n_samples_per_prompt 8 \
    --rollout_batch_size 32 --micro_rollout_batch_size 256 \
    --train_batch_size 128 --micro_train_batch_size 128 \
    --prompt_max_len 24 --generate_max_len 6 --temperature 1.0 \
    --actor_learning_rate 2e-4 --lr_warmup_ratio 0.1 \
    --init_kl_coef 0.01 --use_kl_loss --kl_estimator k3 \
    --eval_dataset "$OUT/held_out.jsonl" --eval_steps 10 \
    --eval_temperature 1.0 --eval_n_samples_per_prompt 4 \
    --colocate_all_models --vllm_num_engines 1 --enforce_eager \
    --seed "$SEED" \
    --save_path "$OUT/rl" --ckpt_path "$OUT/rl/checkpoints"

echo "[4/4] before and after, as a page and a picture"
python -m openrlhf.cli.report "$OUT/rl"
