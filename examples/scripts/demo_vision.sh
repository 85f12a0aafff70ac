#!/usr/bin/env bash
# A vision-language model on two CPU cores, nothing downloaded: a tiny model is made, warmed up on
# answers of which a third are random, and GRPO trains it to name colours and digits. A control run
# sees pictures with nothing in them.
#   OUT=runs/demo-vision   where everything is written        SEED=0   of model, data and training
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/demo-vision}
SEED=${SEED:-0}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false} HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export HF_HUB_DISABLE_PROGRESS_BARS=${HF_HUB_DISABLE_PROGRESS_BARS:-1}

echo "[1/5] model and pictures -> $OUT"
rm -rf "$OUT"
python examples/python/make_vision_demo.py "$OUT" --seed "$SEED"

echo "[2/5] warm-up: supervised fine-tuning on answers of which a third are random"
python -m openrlhf.cli.train_sft \
    --pretrain "$OUT/model" --dataset "$OUT/warm_up.jsonl" --input_key prompt --output_key answer \
    --max_len 64 --max_epochs 1 --train_batch_size 32 --micro_train_batch_size 32 \
    --learning_rate 2e-3 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0.05 \
    --logging_steps 20 --seed "$SEED" \
    --save_path "$OUT/sft" --ckpt_path "$OUT/sft/checkpoints"

grpo=(--pretrain "$OUT/sft" --input_key prompt --label_key label
    --remote_rm_url examples/python/vision_demo_reward.py
    --advantage_estimator group_norm --n_samples_per_prompt 8 --init_kl_coef 0
    --rollout_batch_size 32 --micro_rollout_batch_size 256
    --train_batch_size 256 --micro_train_batch_size 256
    --prompt_max_len 48 --generate_max_len 8 --temperature 1.0
    --actor_learning_rate 5e-4 --lr_scheduler constant --lr_warmup_ratio 0
    --eval_temperature 1.0 --eval_n_samples_per_prompt 4 --seed "$SEED")

echo "[3/5] GRPO: 32 prompts x 8 samples a step"
python -m openrlhf.cli.train_ppo_ray "${grpo[@]}" \
    --prompt_data "$OUT/prompts.jsonl" --eval_dataset "$OUT/held_out.jsonl" --eval_steps 20 \
    --colocate_all_models --vllm_num_engines 1 --enforce_eager \
    --save_path "$OUT/rl" --ckpt_path "$OUT/rl/checkpoints"

echo "[4/5] the control: the same, blind"
python -m openrlhf.cli.train_ppo "${grpo[@]}" \
    --prompt_data "$OUT/blind.jsonl" --eval_dataset "$OUT/blind_held_out.jsonl" --eval_steps 20 \
    --vllm_num_engines 0 \
    --save_path "$OUT/blind" --ckpt_path "$OUT/blind/checkpoints"

echo "[5/5] both as a page, with their pictures"
python -m openrlhf.cli.report "$OUT/rl" "$OUT/blind" --output "$OUT/report.html"
