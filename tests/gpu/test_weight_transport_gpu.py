"""Weights from this process to a vLLM engine in another one, each way; needs CUDA and vLLM."""

from __future__ import annotations

import multiprocessing
import os
import socket
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from openrlhf.engines.base import SHM_BACKEND
from openrlhf.engines.vllm_engine import VLLMEngine, VLLMEngineConfig
from openrlhf.trainer.ray.weight_sync import send_weights
from openrlhf.trainer.ray.weight_transport import IPC_BACKEND, NCCL_BACKEND, make_transport
from tests.engines.helpers import PROMPT, largest_gap, load, request, shake, weights
from tests.tiny import make_model

pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")


def serve(connection: Connection, config: VLLMEngineConfig, devices: str) -> None:
    """Answer calls of an engine until shutdown was one of them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = devices  # before anything asks for CUDA
    engine = VLLMEngine(config)
    method = ""
    while method != "shutdown":
        method, args = connection.recv()
        try:
            connection.send((getattr(engine, method)(*args), None))
        except RuntimeError as error:
            connection.send((None, error))


class RemoteEngine:
    """An engine in a process of its own."""

    def __init__(self, config: VLLMEngineConfig, devices: str) -> None:
        self.weight_transfer_backend = config.weight_transfer_backend
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, config, devices), daemon=True)
        self.process.start()

    def __getattr__(self, method: str) -> Any:
        def call(*args: object) -> Any:
            self.connection.send((method, args))
            assert self.connection.poll(240), f"{method} was not answered"
            answer, error = self.connection.recv()
            if error is not None:
                raise error
            return answer

        return call


def endpoint() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()


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
