"""Weights from this process to a vLLM engine in another one, each way."""

import pytest
import torch

from openrlhf.trainer.workers.weight_sync import BroadcastTransport, HandleTransport
from tests.engines.helpers import PROMPT, largest_gap, load, request, shake, weights
from tests.gpu.engines import RemoteEngine, endpoint
from tests.tiny import make_model

needs_two = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
CASES = [  # way, memory of the buckets, device, GPU of the engine
    pytest.param(HandleTransport, "cpu", "cuda", "0", marks=pytest.mark.gpu),
    pytest.param(HandleTransport, "cuda", "cuda", "0", marks=pytest.mark.gpu),
    pytest.param(BroadcastTransport, "cpu", "cuda", "0", marks=pytest.mark.gpu),
    pytest.param(BroadcastTransport, "cuda", "cuda", "1", marks=[pytest.mark.gpu, needs_two]),
    pytest.param(HandleTransport, "cpu", "cpu", "", marks=pytest.mark.slow),
    pytest.param(BroadcastTransport, "cpu", "cpu", "", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("way", "memory", "device", "gpu"), CASES)
def test_three_updates_arrive(tmp_path, way, memory, device, gpu):
    path = make_model(tmp_path, hidden_size=128)
    dtype, max_gap = (torch.bfloat16, 0.1) if device == "cuda" else (torch.float32, 1e-3)
    config = {
        "model": str(path),
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": 512,
        "gpu_memory_utilization": 0.2,
        "enforce_eager": True,
    }
    engine = RemoteEngine(config, gpu)
    transport = way(torch.device(memory), [engine], endpoint=endpoint)
    transport.bucket_bytes = 50_000  # several buckets, and tensors larger than one
    model = load(path)
    try:
        for version in (1, 2, 3):
            shake(model, version)
            sent = [(name, tensor.to(device, dtype)) for name, tensor in weights(model)]
            fingerprints = transport.send(sent, version)
            assert fingerprints.keys() == dict(weights(model)).keys()
            [[answer]] = engine.generate([request(max_new_tokens=16)])
            assert answer.weight_version == version
            held = load(path)
            held.load_state_dict({n: t.float().cpu() for n, t in sent}, strict=False)
            assert largest_gap(held, PROMPT, answer, 1.0) < max_gap
    finally:
        engine.shutdown()
        engine.process.join(30)
