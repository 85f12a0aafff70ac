#!/usr/bin/env bash
# The first steps of sums.sh by four methods, with three seeds each, and a table of what they reached.
#   OUT=runs/results/methods   where everything is written       STEPS=40   optimizer steps of a run
#   METHODS="grpo rloo reinforce dynamic"   and lora, async       SEEDS="0 1 2"
# Runs that are there are not made again.
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/results/methods}
METHODS=${METHODS:-grpo rloo reinforce dynamic}
declare -A flags=(
    [grpo]="--advantage_estimator group_norm"
    [rloo]="--advantage_estimator rloo"
    [reinforce]="--advantage_estimator reinforce"
    [dynamic]="--dynamic_filtering --dynamic_filtering_reward_range 0 1"
    [lora]="--lora_rank 32 --actor_learning_rate 3e-4"
    [async]="--vllm_num_engines 1 --async_train"
)
for seed in ${SEEDS:-0 1 2}; do
    for method in $METHODS; do
        run=$OUT/$method-$seed
        if [ -e "$run/rl/config.json" ]; then continue; fi
        COMMAND=$([ "$method" = async ] && echo ppo || echo ppo-local) \
            OUT=$run STEPS=${STEPS:-40} SEED=$seed ARGS=${flags[$method]} bash examples/results/sums.sh
    done
done
python examples/results/methods_table.py "$OUT" $METHODS
