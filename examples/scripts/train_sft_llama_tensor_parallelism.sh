#!/usr/bin/env bash
# train_sft.sh with layers split over TENSOR_PARALLEL of the GPUS devices (CPU processes on a machine
# without GPUs).
#   MODEL, DATA, ... name models and data (hub ids or local paths); OUT is the run folder;
#   EXTRA_ARGS are appended and win over what stands here.
set -euo pipefail

OUT=${OUT:-./checkpoint/llama3-8b-sft-tp}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-4}
EXTRA_ARGS="--ds_tensor_parallel_size $TENSOR_PARALLEL --zero_stage 1 ${EXTRA_ARGS:-}"

export OUT EXTRA_ARGS
exec bash "$(dirname "$0")/train_sft.sh"
