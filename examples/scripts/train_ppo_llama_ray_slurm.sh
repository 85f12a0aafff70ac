#!/usr/bin/env bash
#SBATCH --job-name=openrlhf-ppo
#SBATCH --nodes=6
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
#SBATCH --output=slurm-%j.out
# Any RL script on several nodes: sbatch examples/scripts/train_ppo_llama_ray_slurm.sh
# from the checkout, in a folder that all nodes share, in an environment that all nodes have. Ray is
# started on every node, the script runs on the first, and all of it ends with the script. Three
# minutes before its time is over, the run saves and the job is queued again; with
# EXTRA_ARGS="--save_steps 20 --load_checkpoint" it then goes on.
#   SCRIPT is what is run once all nodes are there; its variables (MODEL, DATA, OUT, ...) are passed on;
#   RAY_ARGS are appended to every `ray start`; START_TIMEOUT is how many seconds nodes may take.
set -euo pipefail

SCRIPT=${SCRIPT:-examples/scripts/train_ppo_llama_ray_70b.sh}
PORT=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}
START_TIMEOUT=${START_TIMEOUT:-300}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --all-ip-addresses | awk '{print $1}')
# Every node must know the cluster's secret, and Ray keeps none in the user's home.
export RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

started=()
# A folder of the job's own: in Ray's usual one a dead cluster's address would be left behind.
folder=/tmp/ray-$SLURM_JOB_ID
trap 'kill "${started[@]}" 2> /dev/null || true; wait; srun --overlap rm -rf "$folder" || true' EXIT

# start NODE WORDS...: run `ray start WORDS` on NODE until this script ends.
start() {
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$1" ray start --block "${@:2}" ${RAY_ARGS:-} &
    started+=($!)
}

start "$head" --head --node-ip-address "$address" --port "$PORT" --temp-dir "$folder" \
    --include-dashboard false
export RAY_ADDRESS=$address:$PORT
for node in "${nodes[@]:1}"; do
    start "$node" --address "$RAY_ADDRESS"
done
python - "${#nodes[@]}" "$START_TIMEOUT" << 'EOP'
import sys, time
import ray

count, seconds = int(sys.argv[1]), float(sys.argv[2])
deadline = time.monotonic() + seconds
alive = 0
while alive < count:
    if time.monotonic() > deadline:
        sys.exit(f"{alive} of {count} nodes joined Ray within {seconds:.0f} s")
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    except (ConnectionError, RuntimeError):  # the head is not up yet
        time.sleep(1)
        continue
    alive = sum(node["Alive"] for node in ray.nodes())
    time.sleep(0.5)
EOP
# End the run, which saves, and queue the job again.
requeue() {
    pkill -TERM -P "$run" # the command that the script waits for
    wait "$run" || true
    scontrol requeue "$SLURM_JOB_ID"
}

bash "$SCRIPT" &
run=$!
trap 'requeue; exit' USR1
wait "$run"
