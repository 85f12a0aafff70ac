"""Buckets are bounded, come back bit by bit, and leave nothing behind."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from openrlhf.engines.base import WeightBucket
from openrlhf.engines.shared_memory import ShmBucketReader, ShmBucketWriter, checksum
from openrlhf.errors import WeightSyncError

TENSORS = [
    ("a", torch.arange(10.0)),
    ("b", torch.arange(7, dtype=torch.bfloat16)),
    ("c", torch.ones(3, 5).T),
    ("scalar", torch.tensor(2.5)),
    ("large", torch.arange(1000.0)),
    ("d", torch.zeros(1)),
]


def read_all(bucket_bytes: int) -> tuple[list[WeightBucket], dict[str, torch.Tensor]]:
    reader = ShmBucketReader()
    buckets, tensors = [], {}
    with ShmBucketWriter(bucket_bytes) as writer:
        for bucket in writer.write(TENSORS):
            buckets.append(bucket)
            tensors |= {name: tensor.clone() for name, tensor in reader.read(bucket)}
    reader.close()
    return buckets, tensors


@pytest.mark.parametrize("bucket_bytes", [1, 256, 2**20])
def test_tensors_come_back_bit_by_bit(bucket_bytes):
    _, tensors = read_all(bucket_bytes)
    assert list(tensors) == [name for name, _ in TENSORS]
    for name, tensor in TENSORS:
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_a_bucket_is_bounded_and_a_larger_tensor_travels_alone():
    buckets, _ = read_all(256)
    assert [bucket.names for bucket in buckets] == [("a", "b", "c", "scalar"), ("large",), ("d",)]
    assert [bucket.num_bytes <= 256 for bucket in buckets] == [True, False, True]


def test_the_writer_answers_checksums_of_what_it_was_given():
    fingerprints: dict[str, int] = {}
    with ShmBucketWriter(256) as writer:
        for _ in range(2):  # new pages are written, those that are there are mapped
            read = {}
            for bucket in writer.write(TENSORS, fingerprints):
                read |= {n: checksum(t) for n, t in ShmBucketReader().read(bucket)}
            assert fingerprints == read == {name: checksum(tensor) for name, tensor in TENSORS}


def test_a_checksum_sees_every_bit_and_the_order():
    tensor = torch.arange(600_000.0)  # more than one chunk
    for index in (0, 299_999, 599_999):
        changed = tensor.clone()
        changed.view(torch.int32)[index] ^= 1
        assert checksum(changed) != checksum(tensor)
    assert checksum(tensor.flip(0)) != checksum(tensor)
    assert checksum(tensor.view(1000, 600).T.contiguous().T) == checksum(tensor)


def test_the_last_bucket_can_be_read_while_the_next_is_written():
    reader = ShmBucketReader()
    with ShmBucketWriter(64) as writer:
        buckets = writer.write([("a", torch.ones(8)), ("b", torch.zeros(8))])
        [(_, first)] = reader.read(next(buckets))
        next(buckets)
        assert torch.equal(first, torch.ones(8))


def fingerprints_elsewhere(bucket: WeightBucket, answers: multiprocessing.Queue) -> None:
    answers.put({name: checksum(tensor) for name, tensor in ShmBucketReader().read(bucket)})


def test_another_process_reads_the_same_bits():
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with ShmBucketWriter(2**20) as writer:
        for bucket in writer.write(TENSORS):
            process = context.Process(target=fingerprints_elsewhere, args=(bucket, answers))
            process.start()
            assert answers.get(timeout=30) == {name: checksum(t) for name, t in TENSORS}
            process.join()


def test_nothing_is_left_behind():
    def open_files() -> set[str]:
        return {
            os.readlink(entry)
            for entry in Path("/proc/self/fd").iterdir()
            if entry.is_symlink() and entry.exists()
        }

    before = open_files()
    _, tensors = read_all(256)
    assert open_files() == before
    assert tensors["a"].sum() == 45


def test_a_closed_bucket_cannot_be_opened():
    with ShmBucketWriter(64) as writer:
        [bucket] = writer.write([("a", torch.ones(4))])
    with pytest.raises(WeightSyncError, match=r"cannot be opened|is gone"):
        ShmBucketReader().read(bucket)
