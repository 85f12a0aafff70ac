#!/usr/bin/env bash
# Check the latest checkpoint of a run before another number of ranks, or another ZeRO stage, goes on
# from it with --load_checkpoint --use_ds_universal_ckpt. Nothing has to be converted.
set -euo pipefail

CKPT_PATH=${CKPT_PATH:?name the --ckpt_path of the run}

python -m openrlhf.cli.universal_checkpoint --ckpt_path "$CKPT_PATH"
