"""Weight buckets through shared memory: the trainer writes them, engines read them where they lie.

The writer owns two anonymous memory files in turn, so that a bucket can be filled while the last
one is read. They have no name anywhere, so nothing is left behind when a process dies, and the size
of /dev/shm does not matter; readers of the same user open them through /proc. It works the same
when both sides are one process.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from openrlhf.engines.base import NamedTensors, WeightBucket
from openrlhf.errors import WeightSyncError
from openrlhf.utils.tensors import align, as_bytes, dtype_name, tensors_in

NUM_SEGMENTS = 2
CHUNK_BYTES = 1 << 20  # what is read from memory once and then used twice, out of a cache
NUM_PARTS = 4


def checksum(tensor: Tensor, part: int | None = None) -> int:
    """xxh3 of the raw bits, 64 of them: the fingerprint of tensors that go through host memory.

    With `part`, only every NUM_PARTS-th chunk from that one on is looked at, and the last chunk.
    """
    chunks = as_bytes(tensor).cpu().split(CHUNK_BYTES)
    digest = xxhash.xxh3_64()
    for chunk in chunks if part is None else (*chunks[part::NUM_PARTS], chunks[-1]):
        digest.update(_buffer(chunk))
    return int(digest.intdigest())


class Segment:
    """Memory that other processes may open, taken as it is filled."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create("openrlhf-weights", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        self.inode = os.fstat(self.descriptor).st_ino  # paths come again, this does not
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, num_bytes)
        self._mapped: Tensor | None = None
        self._num_owned = 0  # bytes from the beginning whose pages are there

    def put(self, data: Tensor, begin: int) -> int:
        """Copy bytes (n,) uint8 to `begin` and answer the checksum of what was read; raises
        WeightSyncError when there is no memory.
        """
        digest = xxhash.xxh3_64()
        for chunk in data.cpu().split(CHUNK_BYTES):
            digest.update(_buffer(chunk))
            self._put(chunk, begin)
            begin += len(chunk)
        return int(digest.intdigest())

    def mapped(self) -> Tensor:
        """The memory, (num_bytes,) uint8; it may be touched where something was put."""
        if self._mapped is None:
            memory = mmap.mmap(self.descriptor, self.num_bytes)
            self._mapped = torch.frombuffer(memory, dtype=torch.uint8)
        return self._mapped

    def _put(self, data: Tensor, begin: int) -> None:
        """New pages are written: a mapping would kill the process where memory lacks. Pages that
        are there already are mapped, which takes a third of the time.
        """
        num_mapped = min(max(self._num_owned - begin, 0), len(data))
        if num_mapped:
            # By one thread: the engine needs the others, and memory is not faster for two.
            self.mapped().numpy()[begin : begin + num_mapped] = data[:num_mapped].numpy()
        if num_mapped < len(data):
            self.write(_buffer(data[num_mapped:]), begin + num_mapped)

    def write(self, rest: memoryview, begin: int) -> None:
        """Copy bytes to `begin`; raises WeightSyncError when there is no memory."""
        has_no_gap = begin <= align(self._num_owned)
        try:
            while rest:
                num_written = os.pwrite(self.descriptor, rest, begin)
                rest, begin = rest[num_written:], begin + num_written
        except OSError as error:
            raise WeightSyncError(f"no memory for a bucket of weights: {error}") from error
        if has_no_gap:
            self._num_owned = begin

    def handle(self, *, part: int | None) -> dict[str, object]:
        """How a reader finds the memory; `part`: see `checksum`."""
        return {
            "shm": self.path,
            "inode": self.inode,
            "segment_bytes": self.num_bytes,
            "part": part,
        }

    def close(self) -> None:
        """Let go of the memory; it is freed when the last reader has done the same."""
        self._finalizer()


@dataclass
class Filling:
    """A bucket that is being filled."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    num_bytes: int = 0
    part: int | None = None  # of the tensors, that their checksums are taken of

    def add(self, name: str, tensor: Tensor, begin: int) -> None:
        """Note a tensor that lies at `begin`."""
        self.names.append(name)
        self.dtypes.append(dtype_name(tensor.dtype))
        self.shapes.append(tuple(tensor.shape))
        self.offsets.append(begin)
        self.num_bytes = max(self.num_bytes, begin + tensor.nbytes)

    def bucket(self, segment: Segment) -> WeightBucket:
        """The tensors in the memory where they lie."""
        return WeightBucket(
            tuple(self.names),
            tuple(self.dtypes),
            tuple(self.shapes),
            tuple(self.offsets),
            self.num_bytes,
            segment.handle(part=self.part),
        )


class ShmBucketWriter:
    """Writes tensors into buckets of about `bucket_bytes`.

    Tensors of one module ("model.layers.0.mlp.*") stay together, as an engine may use them as one
    where they lie: a bucket begins early with a new module, and may hold twice as much for an old
    one. A tensor that is larger still travels alone.
    """

    def __init__(self, bucket_bytes: int) -> None:
        assert bucket_bytes > 0
        self.bucket_bytes = bucket_bytes
        self._segments: list[Segment | None] = [None] * NUM_SEGMENTS
        self._turn = 0

    def write(
        self, tensors: NamedTensors, fingerprints: dict[str, int] | None = None
    ) -> Iterator[WeightBucket]:
        """Fill and yield buckets; each may be read until the next but one is asked for.

        `fingerprints` is given the checksum of every tensor as it was before it was copied.
        """
        fingerprints = {} if fingerprints is None else fingerprints
        filling = Filling()
        for name, tensor in tensors:
            begin = align(filling.num_bytes)
            if self._is_full(filling, name, begin + tensor.nbytes):
                yield self._finish(filling)
                filling, begin = Filling(), 0
            segment = self._segment(begin + tensor.nbytes)
            fingerprints[name] = segment.put(as_bytes(tensor), begin)
            filling.add(name, tensor, begin)
        if filling.names:
            yield self._finish(filling)

    def close(self) -> None:
        """Free the shared memory; buckets that were given out can no longer be opened."""
        for segment in self._segments:
            if segment is not None:
                segment.close()
        self._segments = [None] * NUM_SEGMENTS

    def __enter__(self) -> ShmBucketWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_full(self, filling: Filling, name: str, num_bytes: int) -> bool:
        if not filling.names:
            return False
        limit = self.bucket_bytes
        module = module_of(name)
        if module and module == module_of(filling.names[-1]):
            limit *= 2
        elif module and filling.num_bytes > limit // 2:
            return True
        return num_bytes > limit

    def _segment(self, num_bytes: int) -> Segment:
        """The segment whose turn it is, made larger for a tensor that is more than a bucket."""
        segment = self._segments[self._turn]
        if segment is not None and segment.num_bytes < num_bytes:
            segment.close()
            segment = None
        if segment is None:
            segment = Segment(max(num_bytes, 2 * self.bucket_bytes))
            self._segments[self._turn] = segment
        return segment

    def _finish(self, filling: Filling) -> WeightBucket:
        segment = self._segments[self._turn]
        assert segment is not None
        self._turn = (self._turn + 1) % NUM_SEGMENTS
        return filling.bucket(segment)


class ShmBucketReader:
    """Opens buckets of a `ShmBucketWriter`, in this process or another one."""

    def __init__(self) -> None:
        self._mapped: dict[int, Tensor] = {}  # by inode

    def read(self, bucket: WeightBucket) -> list[tuple[str, Tensor]]:
        """(name, view into the shared memory) of every tensor; valid as long as the bucket is."""
        views = tensors_in(self.memory(bucket), bucket.dtypes, bucket.shapes, bucket.offsets)
        return list(zip(bucket.names, views, strict=True))

    def close(self) -> None:
        """Let go of all segments."""
        self._mapped.clear()

    def memory(self, bucket: WeightBucket) -> Tensor:
        """The memory of the bucket's segment, (segment_bytes,) uint8."""
        path, inode, num_bytes = (bucket.handle[key] for key in ("shm", "inode", "segment_bytes"))
        assert isinstance(inode, int) and isinstance(num_bytes, int)
        memory = self._mapped.pop(inode, None)
        if memory is None:
            if len(self._mapped) == NUM_SEGMENTS + 1:  # the writer has a new one in its place
                del self._mapped[next(iter(self._mapped))]
            memory = _mapped(str(path), inode, num_bytes)
        self._mapped[inode] = memory  # the last one used is at the end
        return memory


def checked_part(bucket: WeightBucket) -> int | None:
    """The part of its tensors that the checksums of this bucket are taken of; None: all."""
    part = bucket.handle["part"]
    assert part is None or isinstance(part, int)
    return part


def module_of(name: str) -> str:
    """The module that a weight's layer belongs to; "" for a name of less than three parts."""
    return name.rsplit(".", 2)[0] if name.count(".") >= 2 else ""


def _buffer(data: Tensor) -> memoryview:
    """Bytes (n,) uint8 in host memory, as libraries beside torch read them."""
    return memoryview(data.numpy())


def _mapped(path: str, inode: int, num_bytes: int) -> Tensor:
    """The memory as (num_bytes,) uint8, mapped until the last tensor that looks into it is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise WeightSyncError(f"a bucket of weights cannot be opened: {error}") from error
    try:
        if os.fstat(descriptor).st_ino != inode:
            raise WeightSyncError(f"a bucket of weights is gone: {path} is something else")
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)
