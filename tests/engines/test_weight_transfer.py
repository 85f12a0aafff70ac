"""Buckets reach other processes of the node by a handle, and any process by a broadcast."""

import multiprocessing
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch
import transformers

from openrlhf.distributed.weights import total_bytes
from openrlhf.engines import weight_transfer
from openrlhf.engines.weight_transfer import Broadcasts, BucketReader
from openrlhf.errors import EngineError
from openrlhf.trainer.workers.weight_sync import HandleTransport, WeightTransport
from openrlhf.utils.tensors import fingerprint
from tests.gpu.engines import endpoint

CPU = torch.device("cpu")
WEIGHTS = [
    ("a", torch.arange(4.0)),
    ("odd", torch.tensor([3.0], dtype=torch.bfloat16)),
    ("b", torch.arange(6.0).view(2, 3).T),
]


def writer(bucket_bytes: int = 1024) -> WeightTransport:
    transport = HandleTransport(CPU, [])
    transport.is_used = True
    transport.bucket_bytes = bucket_bytes
    return transport


def read_all(connection: Connection, port: int | None) -> None:
    """In a process of its own: answer the fingerprints of every bucket."""
    reader = BucketReader(CPU)
    if port is not None:
        reader.join(Broadcasts("127.0.0.1", port, rank=1, world_size=2).join(CPU), CPU)
    while (bucket := connection.recv()) is not None:
        connection.send({name: fingerprint(tensor) for name, tensor in reader.read(bucket)})


@pytest.mark.parametrize("way", ["handle", "broadcast"])
def test_another_process_reads_what_was_written(way):
    host, port = endpoint()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    args = (theirs, port if way == "broadcast" else None)
    process = context.Process(target=read_all, args=args, daemon=True)
    process.start()
    group = None
    if way == "broadcast":
        group = Broadcasts(host, port, rank=0, world_size=2).join(CPU)
    transport = writer()
    for version in range(3):
        tensors = [(name, tensor + version) for name, tensor in WEIGHTS]
        for bucket, data in transport.buckets(tensors):
            ours.send(bucket)
            if group:
                group.broadcast(data)
            assert ours.recv() == {name: fingerprint(tensor) for name, tensor in tensors}
        transport.finish()
    ours.send(None)
    process.join(20)
    assert process.exitcode == 0


def serve_store(port: int) -> None:
    """In a process of its own: serve the store of a group, until it is killed."""
    _ = Broadcasts("127.0.0.1", port, rank=0, world_size=3)
    time.sleep(60)


def test_a_trainer_that_dies_while_engines_join_holds_none_of_them(monkeypatch):
    monkeypatch.setattr(weight_transfer, "CONNECT_TIMEOUT", timedelta(seconds=2))
    _, port = endpoint()
    process = multiprocessing.get_context("spawn").Process(target=serve_store, args=(port,))
    process.start()
    while not is_served(port):
        time.sleep(0.05)
    group = Broadcasts("127.0.0.1", port, rank=1, world_size=3)
    process.kill()
    process.join()
    started_at = time.monotonic()
    with pytest.raises(EngineError, match="the broadcast of weights failed: "):
        group.join(CPU)
    with pytest.raises(EngineError, match="the broadcast of weights failed: "):  # told too late
        Broadcasts("127.0.0.1", port, rank=2, world_size=3)
    assert time.monotonic() - started_at < 10


def come_and_die(port: int) -> None:
    """In a process of its own: a member that dies once all are there."""
    group = Broadcasts("127.0.0.1", port, rank=2, world_size=3)
    group._store.set(f"{weight_transfer.HERE}2", "")
    os._exit(1)


def test_a_member_that_dies_once_it_has_come_holds_none_of_the_others():
    host, port = endpoint()
    groups = [Broadcasts(host, port, rank=0, world_size=3)]
    groups.append(Broadcasts(host, port, rank=1, world_size=3))
    process = multiprocessing.get_context("spawn").Process(target=come_and_die, args=(port,))
    process.start()
    with ThreadPoolExecutor() as pool:
        joining = [pool.submit(group.join, CPU) for group in groups]
        process.join()
        time.sleep(1)
        assert not any(joined.done() for joined in joining)
        started_at = time.monotonic()
        groups[0].break_off()
        assert time.monotonic() - started_at < 1
        for joined in joining:
            with pytest.raises(EngineError, match=weight_transfer.WAS_BROKEN_OFF):
                joined.result(timeout=10)


def is_served(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Unread(WeightTransport):
    """The side of a rank that nobody reads from: it packs nothing."""

    def address(self, data):
        return {}


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A weight of an adapter's base in four bits, two numbers in a byte."""
    parameter = weight.new_empty((weight.numel() + 1) // 2, dtype=torch.uint8)
    parameter.quant_state = SimpleNamespace(shape=weight.shape, dtype=torch.bfloat16)
    return parameter


def test_weights_in_four_bits_count_as_the_plain_numbers_that_are_sent():
    weight, bias = torch.empty(4, 3), torch.empty(3, dtype=torch.bfloat16)
    assert total_bytes([packed(weight), bias]) == 2 * 12 + 2 * 3


def test_buffers_of_the_largest_models_do_not_grow_with_them():
    assert Unread(CPU, [], num_bytes=470 * 10**9).bucket_bytes == 5 * 2**30


SHAPES = {  # hidden size, of the MLP, layers, heads, of keys and values, vocabulary
    "Yi-6B": (4096, 11008, 32, 32, 4, 64000),
    "Mistral-7B": (4096, 14336, 32, 32, 8, 32000),
    "Mistral-24B": (5120, 32768, 40, 40, 8, 131072),
    "Llama-70B": (8192, 28672, 80, 64, 8, 128256),
}


@pytest.mark.parametrize(
    ("name", "is_packed"), [*((name, False) for name in SHAPES), ("Llama-70B", True)]
)
def test_an_update_of_a_large_model_takes_at_most_64_calls_of_an_engine(name, is_packed):
    hidden, inner, layers, heads, kv, words = SHAPES[name]
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=words,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    held = [packed(p) if is_packed and p.dim() == 2 else p for p in model.parameters()]
    size = total_bytes(held)
    transport = Unread(CPU, [], num_bytes=size)
    transport.is_used = False
    found = [bucket for bucket, _ in transport.buckets(model.named_parameters())]
    assert 30 < len(found) <= 64 - 3  # which connect, begin and finish
    assert sum(len(bucket.names) for bucket in found) == len(dict(model.named_parameters()))
    largest = max(p.nbytes for p in model.parameters())
    assert max(bucket.num_bytes for bucket in found) <= max(size / 30, largest)
