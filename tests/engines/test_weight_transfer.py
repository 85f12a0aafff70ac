"""Buckets reach other processes of the node by a handle, and any process by a broadcast."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
import torch

from openrlhf.engines.weight_transfer import (
    BroadcastGroup,
    BucketBuffers,
    BucketReader,
    HostMemory,
)
from openrlhf.errors import WeightSyncError
from openrlhf.utils.tensors import fingerprint
from tests.gpu.engines import endpoint

CPU = torch.device("cpu")
WEIGHTS = [
    ("a", torch.arange(4.0)),
    ("odd", torch.tensor([3.0], dtype=torch.bfloat16)),
    ("b", torch.arange(6.0).view(2, 3).T),
]


def writer(bucket_bytes: int = 1024) -> BucketBuffers:
    buffers = BucketBuffers(HostMemory())
    buffers.bucket_bytes = bucket_bytes
    return buffers


def read_all(connection: Connection, port: int | None) -> None:
    """In a process of its own: answer the fingerprints of every bucket."""
    reader = BucketReader(CPU)
    if port is not None:
        reader.join(BroadcastGroup(CPU, "127.0.0.1", port, rank=1, world_size=2))
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
        group = BroadcastGroup(CPU, host, port, rank=0, world_size=2)
    buffers = writer()
    for version in range(3):
        tensors = [(name, tensor + version) for name, tensor in WEIGHTS]
        for packed in buffers.pack(tensors):
            ours.send(packed.bucket({} if group else dict(buffers.handle())))
            if group:
                group.broadcast(packed.data)
            assert ours.recv() == {name: fingerprint(tensor) for name, tensor in tensors}
        buffers.release()
    ours.send(None)
    process.join(20)
    assert process.exitcode == 0


def test_tensors_lie_at_multiples_of_64_bytes_and_a_large_one_alone():
    large = ("large", torch.full((40,), 2.0))
    found = [
        (bucket.names, bucket.offsets, bucket.num_bytes)
        for packed in writer(128).pack([*WEIGHTS, large, WEIGHTS[0]])
        if (bucket := packed.bucket({}))
    ]
    assert found == [
        (("a", "odd"), (0, 64), 66),
        (("b",), (0,), 24),
        (("large",), (0,), 160),
        (("a",), (0,), 16),
    ]


def test_a_rank_that_nobody_reads_from_walks_through_the_same_buckets_without_memory():
    buffers = BucketBuffers(HostMemory(), is_used=False)
    buffers.bucket_bytes = 64
    assert [p.bucket({}).names for p in buffers.pack(WEIGHTS)] == [("a",), ("odd",), ("b",)]
    assert buffers.handle() == {}


def test_released_memory_is_taken_again_and_leaves_no_file():
    memory = HostMemory()
    buffer = memory.allocate(100)
    _, descriptor, _, _ = memory.export(buffer)
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{descriptor}")
    memory.release([buffer])
    assert memory.allocate(50) is buffer
    assert memory.allocate(50) is not buffer


def test_memory_that_is_gone_is_not_mistaken_for_what_took_its_place():
    memory = HostMemory()
    buffer = memory.allocate(64)
    pid, descriptor, inode, num_bytes = memory.export(buffer)
    with pytest.raises(WeightSyncError, match="is something else"):
        HostMemory().open((pid, descriptor, inode + 1, num_bytes))
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        HostMemory().open((pid, 9_999, inode, num_bytes))
