#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns sums from its own samples without RL: SFT on the right ones (and on a
# format), DPO from pairs, KTO from labels, and distillation on its own responses from a trained model.
#   OUT=runs/results/offline   where everything is written      PROMPTS=600   8 samples each
#   TEACHER=runs/results/sums/rl   model of sums.sh, for the distillation      SEED=0
#   METHODS="sft dpo kto boxed kd"
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/results/offline}
PROMPTS=${PROMPTS:-600}
MODEL=models/smollm2-135m
TEACHER=${TEACHER:-runs/results/sums/rl}
METHODS=" ${METHODS:-sft dpo kto boxed kd} "
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

test -e "$MODEL/README.md" || make real-model
python examples/results/make_sums.py "$OUT" "$PROMPTS"
test -e "$OUT/samples.jsonl" || python -m openrlhf.cli.main infer \
    --eval_task generate_vllm --pretrain "$MODEL" --dataset "$OUT/prompts.jsonl" \
    --input_key question --apply_chat_template --prompt_max_len 64 --max_new_tokens 48 \
    --best_of_n 8 --seed "${SEED:-0}" --output_path "$OUT/samples.jsonl"
python examples/results/sums_rows.py "$OUT"

models=$MODEL
# train COMMAND NAME FLAGS...: train the model, if it is asked for and not there.
train() {
    if [[ $METHODS != *" $2 "* ]]; then return; fi
    models=$models,$OUT/$2
    if [ -e "$OUT/$2/config.json" ]; then return; fi
    python -m openrlhf.cli.main "$1" --pretrain "$MODEL" --param_dtype bf16 --export_fp32 \
        --apply_chat_template --max_len 128 --train_batch_size 64 --micro_train_batch_size 32 \
        --seed "${SEED:-0}" --save_path "$OUT/$2" "${@:3}"
}
train sft sft --dataset "$OUT/right.jsonl" --input_key question --output_key output \
    --learning_rate 2e-5 --max_epochs 2
train dpo dpo --dataset "$OUT/pairs.jsonl" --prompt_key question --beta 0.1 --learning_rate 1e-5 \
    --max_epochs 2
train kto kto --dataset "$OUT/labelled.jsonl" --input_key question --output_key output --beta 0.1 \
    --learning_rate 1e-5
train sft boxed --dataset "$OUT/boxed.jsonl" --input_key question --output_key output \
    --learning_rate 2e-5 --max_epochs 2
if [[ $METHODS == *" kd "* && -e $TEACHER/config.json ]]; then
    train kd kd --kd_on_policy --teacher_model "$TEACHER" --dataset "$OUT/prompts.jsonl" \
        --input_key question --output_key answer --kd_max_new_tokens 16 \
        --learning_rate 2e-5 --max_epochs 2
    models=$models,$TEACHER
fi
python -m openrlhf.cli.main eval "$models" \
    --eval_dataset "$OUT/held_out.jsonl" --input_key question --label_key answer \
    --apply_chat_template --prompt_max_len 64 --generate_max_len 48 \
    --eval_n_samples_per_prompt 1 --remote_rm_url examples/results/sums_reward.py \
    --save_path "$OUT/eval"
