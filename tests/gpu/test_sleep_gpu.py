"""An engine that slept while the policy was trained wakes up with the new weights; needs vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from openrlhf.trainer.device_phases import DevicePhases
from openrlhf.trainer.workers.weight_sync import HandleTransport, WeightTransport
from tests.engines.helpers import PROMPT, largest_gap, load, request, shake, weights
from tests.gpu.engines import DEVICES, RemoteEngine, endpoint
from tests.tiny import make_model

SHARE = 0.2  # of the GPU's memory that the engine takes
MAX_GAP = {"cuda": 0.1, "cpu": 1e-3}  # of log-probs: bf16, fp32


@contextmanager
def sleeping_engine(path: Path, device: str) -> Iterator[tuple[RemoteEngine, WeightTransport]]:
    """An engine that may sleep, and the way to it."""
    config = {
        "model": str(path),
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "max_model_len": 512,
        "gpu_memory_utilization": SHARE,
        "enforce_eager": True,
        "enable_sleep_mode": True,
    }
    engine = RemoteEngine(config, "0" if device == "cuda" else "")
    transport = HandleTransport(torch.device(device), [engine], endpoint=endpoint)
    try:
        yield engine, transport
    finally:
        engine.shutdown()
        engine.process.join(30)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_came_between_two_sleeps_are_what_is_sampled_with(tmp_path, device):
    path = make_model(tmp_path, hidden_size=128)
    model = load(path)
    with sleeping_engine(path, device) as (engine, transport):
        phases = DevicePhases([engine], engines_sleep=True, training_sleeps=False)
        phases.sleep()
        for version in (1, 2, 3):
            with phases.training():
                assert phases.needs_weights
                shake(model, version)
                if device == "cuda":
                    model.bfloat16()
            sent = [(name, tensor.to(device)) for name, tensor in weights(model)]
            with phases.sync():
                transport.send(sent, version)
            with phases.rollout():
                [[answer]] = engine.generate([request(max_new_tokens=16)])
            model.float()
            assert answer.weight_version == version
            assert largest_gap(model, PROMPT, answer, 1.0) < MAX_GAP[device]


@pytest.mark.gpu
def test_a_sleeping_engine_gives_its_memory_back_and_takes_it_again(tmp_path):
    path = make_model(tmp_path, hidden_size=128)
    sent = [(name, tensor.to("cuda", torch.bfloat16)) for name, tensor in weights(load(path))]
    with sleeping_engine(path, "cuda") as (engine, transport):
        awake, total = torch.cuda.mem_get_info()
        engine.sleep()
        asleep, _ = torch.cuda.mem_get_info()
        assert asleep - awake > 0.8 * SHARE * total  # nearly all of it was cache
        engine.wake_up("weights")
        only_weights, _ = torch.cuda.mem_get_info()
        assert only_weights - awake > 0.8 * SHARE * total  # the cache is still away
        transport.send(sent, 1)
        engine.wake_up("kv_cache")
        again, _ = torch.cuda.mem_get_info()
        assert again == pytest.approx(awake, abs=0.02 * total)
        [[answer]] = engine.generate([request(max_new_tokens=4)])
        assert len(answer.token_ids) > 0
