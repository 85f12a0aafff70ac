#!/usr/bin/env bash
#SBATCH --job-name=openrlhf-dpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
#SBATCH --output=slurm-%j.out
# Direct preference optimisation on several nodes: sbatch examples/scripts/train_llama_slurm.sh
# from a folder that all nodes share, in an environment that all nodes have. srun starts torchrun on
# every node, and the first node is where they meet. Three minutes before its time is over, the run
# saves and the job is queued again; it then goes on. So it does after a preemption.
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   GPUS is how many processes a node gets; EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
DATA=${DATA:-OpenRLHF/preference_dataset_mixture2_and_safe_pku}
CHOSEN_KEY=${CHOSEN_KEY:-chosen}
REJECTED_KEY=${REJECTED_KEY:-rejected}
OUT=${OUT:-./checkpoint/llama3-8b-dpo-slurm}
GPUS=${GPUS:-8}
PORT=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# End the run, which saves, and queue the job again.
requeue() {
    scancel --signal=TERM "$SLURM_JOB_ID"
    wait "$run" || true
    scontrol requeue "$SLURM_JOB_ID"
}

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=150 # seconds for the save, as torchrun counts
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc_per_node "$GPUS" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$first:$PORT" \
    -m openrlhf.cli.train_dpo \
    --pretrain "$MODEL" \
    --dataset "$DATA" \
    --chosen_key "$CHOSEN_KEY" --rejected_key "$REJECTED_KEY" \
    --apply_chat_template \
    --max_len 8192 \
    --train_batch_size 256 --micro_train_batch_size 2 \
    --max_epochs 1 \
    --beta 0.1 \
    --learning_rate 5e-7 \
    --zero_stage 3 --bf16 --flash_attn --packing_samples --gradient_checkpointing \
    --eval_steps -1 --save_steps 200 --load_checkpoint --logging_steps 1 \
    --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    ${EXTRA_ARGS:-} &
run=$!
trap 'requeue; exit' USR1
wait "$run"
