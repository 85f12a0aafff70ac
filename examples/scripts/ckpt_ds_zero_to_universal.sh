#!/usr/bin/env bash
# Convert the latest checkpoint of a run before another number of ranks, or another ZeRO stage, goes
# on from it with --load_checkpoint --use_ds_universal_ckpt. That command converts by itself what was
# not converted; for a big model do it here, without GPUs and with several processes.
set -euo pipefail

CKPT_PATH=${CKPT_PATH:-./ckpt/checkpoints}   # --ckpt_path of the run
WORKERS=${WORKERS:-4}                        # processes; each holds a part of the optimizer's states

python -m openrlhf.cli.universal_checkpoint --ckpt_path "$CKPT_PATH" --num_workers "$WORKERS"
