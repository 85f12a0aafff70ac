#!/usr/bin/env bash
# Builds the image (once) and runs a command in it, in this folder, with all GPUs:
#   examples/scripts/docker_run.sh bash examples/scripts/train_sft.sh
# Without a command it opens a shell. Needs Docker and the NVIDIA container toolkit.
#   IMAGE names the image; DOCKER_ARGS are appended to `docker run`.
# What the run writes here belongs to you; models are kept in your Hugging Face cache.
set -euo pipefail

IMAGE=${IMAGE:-openrlhf}
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
CACHE=${HF_HOME:-$HOME/.cache/huggingface}

if [ -z "$(docker images --quiet "$IMAGE")" ]; then
    docker build --tag "$IMAGE" --file "$ROOT/dockerfile/Dockerfile" "$ROOT"
fi
mkdir -p "$CACHE"
terminal=()
if [ -t 0 ] && [ -t 1 ]; then
    terminal=(--interactive --tty)
fi
# Shared memory: Ray's object store and the loader of every rank. memlock: buffers pinned for GPUs.
exec docker run --rm "${terminal[@]}" \
    --gpus all --ipc host --ulimit memlock=-1 --ulimit stack=67108864 \
    --user "$(id -u):$(id -g)" \
    --env HOME=/tmp --env USER=user --env HF_HOME=/hf --env HF_TOKEN --env WANDB_API_KEY \
    --volume "$CACHE:/hf" --volume "$PWD:/work" --workdir /work \
    ${DOCKER_ARGS:-} \
    "$IMAGE" "${@:-bash}"
