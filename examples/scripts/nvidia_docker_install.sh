#!/usr/bin/env bash
# Installs Docker and the NVIDIA container toolkit on Debian or Ubuntu, for docker_run.sh beside it.
# Needs root or sudo, the GPU's driver, and the network. What is there already is left as it is.
set -euo pipefail

as_root=(sudo)
if [ "$(id -u)" = 0 ]; then as_root=(); fi

if ! command -v nvidia-smi > /dev/null; then
    echo "nvidia-smi is not found: install the GPU's driver first" >&2
    exit 2
fi
"${as_root[@]}" apt-get update
"${as_root[@]}" apt-get install --yes ca-certificates curl gnupg
if ! command -v docker > /dev/null; then
    "${as_root[@]}" apt-get install --yes docker.io
fi
if ! command -v nvidia-ctk > /dev/null; then
    keys=/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg
    url=https://nvidia.github.io/libnvidia-container
    curl -fsSL "$url/gpgkey" | "${as_root[@]}" gpg --dearmor --yes --output "$keys"
    echo "deb [signed-by=$keys] $url/stable/deb/\$(ARCH) /" |
        "${as_root[@]}" tee /etc/apt/sources.list.d/nvidia-container-toolkit.list > /dev/null
    "${as_root[@]}" apt-get update
    "${as_root[@]}" apt-get install --yes nvidia-container-toolkit
fi
"${as_root[@]}" nvidia-ctk runtime configure --runtime=docker
"${as_root[@]}" systemctl restart docker
"${as_root[@]}" docker run --rm --gpus all ubuntu nvidia-smi
