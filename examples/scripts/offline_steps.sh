# Sourced by the scripts of the offline loops: the variables they share, and the steps they repeat.
# A step whose output is there is skipped, so a script that was stopped goes on where it stopped.
# vLLM reads whole models: with adapters (TRAIN_ARGS="--lora_rank 8") set ENGINE=generate.
MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B-Instruct}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-mixture}
DATA=${DATA:-OpenRLHF/prompt-collection-v0.1}
INPUT_KEY=${INPUT_KEY:-context_messages}
ITERATIONS=${ITERATIONS:-4}
PROMPTS=${PROMPTS:-2048}
SAMPLES=${SAMPLES:-4}
GPUS=${GPUS:-8}
ENGINE=${ENGINE:-generate_vllm}
# How prompts become text. Rows of `answer` hold the text that the model read, or message lists:
# an answer is scored and learnt as it was sampled.
FORMAT=${FORMAT:---apply_chat_template}

launcher=(python -m)
if [ "$GPUS" -gt 1 ]; then
    launcher=(torchrun --standalone --nproc_per_node "$GPUS" -m)
fi

# answer MODEL OUTPUT FLAGS...: sample answers to the prompts of DATA. vLLM takes all GPUs itself.
answer() {
    if [ -f "$2" ]; then return; fi
    python -m openrlhf.cli.batch_inference \
        --eval_task "$ENGINE" --pretrain "$1" \
        --dataset "$DATA" --input_key "$INPUT_KEY" $FORMAT \
        --prompt_max_len 1024 --max_new_tokens 1024 --temperature 1.0 \
        --output_path "$2" "${@:3}" \
        ${GENERATE_ARGS:-}
}

# score ROWS OUTPUT FLAGS...: score answers with the reward model, and do with them what FLAGS say.
score() {
    if [ -f "$2" ]; then return; fi
    "${launcher[@]}" openrlhf.cli.batch_inference \
        --eval_task rm --pretrain "$REWARD_MODEL" \
        --dataset "$1" $FORMAT \
        --max_len 2048 --micro_batch_size 8 --ds.param_dtype bf16 \
        --output_path "$2" "${@:3}" \
        ${SCORE_ARGS:-}
}

# train COMMAND MODEL ROWS FOLDER FLAGS...: train MODEL on ROWS and leave it in FOLDER.
train() {
    if [ -f "$4/config.json" ] || [ -f "$4/adapter_config.json" ]; then return; fi
    "${launcher[@]}" "openrlhf.cli.$1" \
        --pretrain "$2" --dataset "$3" $FORMAT \
        --max_len 2048 --train_batch_size 128 --micro_train_batch_size 2 \
        --max_epochs 1 --ds.param_dtype bf16 --gradient_checkpointing \
        --save_path "$4" --ckpt_path "$4/checkpoints" "${@:5}" \
        ${TRAIN_ARGS:-}
}
