"""Weights from this process to a vLLM engine in another one, each way; needs CUDA and vLLM."""

from __future__ import annotations

import pytest
import torch

from openrlhf.engines.base import SHM_BACKEND
from openrlhf.engines.vllm_engine import VLLMEngineConfig
from openrlhf.trainer.ray.weight_sync import send_weights
from openrlhf.trainer.ray.weight_transport import IPC_BACKEND, NCCL_BACKEND, make_transport
from tests.engines.helpers import PROMPT, largest_gap, load, request, shake, weights
from tests.gpu.engines import RemoteEngine, endpoint
from tests.tiny import make_model

pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")


@pytest.mark.parametrize(
    ("backend", "devices"),
    [(SHM_BACKEND, "0"), (IPC_BACKEND, "0"), pytest.param(NCCL_BACKEND, "1", marks=needs_two)],
)
def test_three_updates_arrive(tmp_path, backend, devices):
    path = make_model(tmp_path, hidden_size=128)
    config = VLLMEngineConfig(
        str(path),
        dtype="bfloat16",
        max_model_len=512,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
        weight_transfer_backend=backend,
    )
    engine = RemoteEngine(config, devices)
    device = torch.device("cuda", 0)
    transport = make_transport(
        [engine], rank=0, tensor_parallel_size=1, device=device, endpoint=endpoint
    )
    transport.connect([engine])
    if backend != SHM_BACKEND:
        transport.buffer.bucket_bytes = 50_000  # several buckets, and tensors larger than one
    model = load(path)
    try:
        for version in (1, 2, 3):
            shake(model, version)
            model.bfloat16()
            sent = [(name, tensor.to(device)) for name, tensor in weights(model)]
            report = send_weights(sent, [engine], version, writer=transport)
            assert report.fingerprints.keys() == dict(weights(model)).keys()
            [[answer]] = engine.generate([request(max_new_tokens=16)])
            assert answer.weight_version == version
            assert largest_gap(model.float(), PROMPT, answer, 1.0) < 0.1
    finally:
        engine.shutdown()
        engine.process.join(30)
