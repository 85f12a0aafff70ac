#!/usr/bin/env bash
# GRPO teaches SmolLM2-135M-Instruct to add numbers of up to two digits, on two CPU cores.
#   OUT=runs/results/sums   where everything is written       SEED=0   of the run
#   STEPS=200   optimizer steps       ARGS="--lora_rank 16 …"   flags that come last
#   COMMAND=ppo ARGS="--vllm_num_engines 1 --async_train"   on Ray, sampling beside training
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/results/sums}
STEPS=${STEPS:-200}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

test -e models/smollm2-135m/README.md || make real-model
${MAKE:-python examples/results/make_sums.py} "$OUT" $((16 * STEPS))
# 16 prompts x 8 samples are a step; matrix products are in bf16, which the cores of a server have.
python -m openrlhf.cli.main "${COMMAND:-ppo-local}" \
    --pretrain models/smollm2-135m --param_dtype bf16 \
    --prompt_data "$OUT/prompts.jsonl" \
    --input_key question --label_key answer --apply_chat_template \
    --remote_rm_url "${REWARD:-examples/results/sums_reward.py}" \
    --advantage_estimator group_norm --n_samples_per_prompt 8 --init_kl_coef 0 \
    --rollout_batch_size 16 --micro_rollout_batch_size 128 \
    --train_batch_size 128 --micro_train_batch_size 32 \
    --prompt_max_len 64 --generate_max_len 16 --temperature 1.0 --vllm_num_engines 0 \
    --actor_learning_rate 3e-5 --lr_scheduler cosine_with_min_lr --lr_warmup_ratio 0.05 \
    --eval_dataset "$OUT/held_out.jsonl" --eval_steps 15 --eval_n_samples_per_prompt 1 \
    --seed "${SEED:-0}" --save_path "$OUT/rl" ${ARGS:-}

python -m openrlhf.cli.report "$OUT/rl"
python examples/results/answers.py "$OUT/rl"
