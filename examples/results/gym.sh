#!/usr/bin/env bash
# GRPO teaches SmolLM2-135M-Instruct a task of reasoning-gym, as sums.sh teaches it sums.
#   TASK=chain_sum   or another one of make_gym.py
#   OUT=runs/results/gym/TASK   SEED=0   STEPS=100   ARGS="…": those of sums.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

TASK=${TASK:-chain_sum}
export OUT=${OUT:-runs/results/gym/$TASK}
test -e .reasoning-gym/.installed || make reasoning-gym
export PYTHONPATH=$PWD/.reasoning-gym:${PYTHONPATH:-} PYTHONWARNINGS=ignore
MAKE="python examples/results/make_gym.py $TASK" REWARD=examples/results/gym_reward.py \
    STEPS=${STEPS:-100} ARGS="--prompt_max_len 128 --generate_max_len 32 ${ARGS:-}" bash examples/results/sums.sh
