#!/usr/bin/env bash
# GRPO against a reward model behind HTTP: start the server, wait until it is ready, train, stop it.
#   MODEL, REWARD_MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   SERVER_GPUS and TRAIN_GPUS share out a machine's GPUs: 7 and 0,1,2,3,4,5,6 with GPUS=7;
#   EXTRA_ARGS are appended to the training command and win over what stands here, SERVER_ARGS to the server's.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
DATA=${DATA:-OpenRLHF/prompt-collection-v0.1}
INPUT_KEY=${INPUT_KEY:-context_messages}
OUT=${OUT:-./checkpoint/llama3-8b-remote-rm}
GPUS=${GPUS:-7}
SERVER_GPUS=${SERVER_GPUS-$GPUS}                             # the one after those of training
TRAIN_GPUS=${TRAIN_GPUS-$(seq -s, 0 $((GPUS - 1)))}
ENGINES=${ENGINES:-7}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}
PORT=${PORT:-5000}
MAX_LEN=${MAX_LEN:-2048}

is_ready() {
    python -c 'import http.client, sys
server = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=5)
server.request("GET", "/ready")
sys.exit(server.getresponse().status != 200)' "$PORT" 2> /dev/null
}

mkdir -p "$OUT/logs"
env ${SERVER_GPUS:+CUDA_VISIBLE_DEVICES=$SERVER_GPUS} python -m openrlhf.cli.serve_rm \
    --reward_pretrain "$REWARD_MODEL" --normalize_reward \
    --port "$PORT" --max_len "$MAX_LEN" --bf16 \
    ${SERVER_ARGS:-} > "$OUT/logs/reward-server.log" 2>&1 &
SERVER=$!
# SIGTERM: the server answers what is in flight and ends.
trap 'kill "$SERVER" 2> /dev/null || true; wait "$SERVER" || true' EXIT
until is_ready; do
    if ! kill -0 "$SERVER" 2> /dev/null; then
        echo "the reward server ended; the last lines of $OUT/logs/reward-server.log:" >&2
        tail -n 5 "$OUT/logs/reward-server.log" >&2
        exit 1
    fi
    sleep 0.5
done

env ${TRAIN_GPUS:+CUDA_VISIBLE_DEVICES=$TRAIN_GPUS} python -m openrlhf.cli.train_ppo_ray \
    --colocate_all_models \
    --actor_num_nodes 1 --actor_num_gpus_per_node "$GPUS" \
    --vllm_num_engines "$ENGINES" --vllm_tensor_parallel_size "$TENSOR_PARALLEL" \
    --vllm_gpu_memory_utilization 0.5 --vllm_enable_sleep --deepspeed_enable_sleep \
    --pretrain "$MODEL" --remote_rm_url "http://127.0.0.1:$PORT/get_reward" \
    --prompt_data "$DATA" --input_key "$INPUT_KEY" --apply_chat_template \
    --advantage_estimator group_norm --n_samples_per_prompt 8 \
    --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 \
    --rollout_batch_size 128 --micro_rollout_batch_size 16 \
    --train_batch_size 1024 --micro_train_batch_size 4 \
    --actor_learning_rate 5e-7 --max_samples 100000 --max_epochs 1 --num_episodes 1 \
    --prompt_max_len 1024 --generate_max_len 1024 \
    --zero_stage 3 --bf16 --flash_attn --gradient_checkpointing --packing_samples \
    --save_steps -1 --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-}
