"""Weights through Ray's object store, for machines between which no collective group can form.

The trainer puts each bucket into the store of its node. Ray copies it once to every other node with
an engine, and the engine lays it into memory that the workers of vLLM read as any other bucket: so
the fingerprints in the receipt are of what arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import ray
from torch import nn

from openrlhf.engines.base import NamedTensors, WeightBucket
from openrlhf.engines.shared_memory import Segment, ShmBucketReader, ShmBucketWriter
from openrlhf.errors import WeightSyncError
from openrlhf.trainer.ray.weight_sync import drain

FETCH_TIMEOUT_S = 600.0  # for one bucket from another node


class ObjectStoreTransport:
    """Buckets in Ray's object store; see WeightTransport."""

    fills_ahead = True

    def __init__(self, bucket_bytes: int) -> None:
        self.writer = ShmBucketWriter(bucket_bytes)
        self.reader = ShmBucketReader()

    def connect(self, engines: Any) -> None:
        """Nothing has to be agreed on."""

    def share(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Nothing is shared: every engine gets a copy."""

    def write(self, tensors: NamedTensors, fingerprints: dict[str, int]) -> Iterator[WeightBucket]:
        """See BucketWriter."""
        for bucket in self.writer.write(tensors, fingerprints):
            content = self.reader.memory(bucket)[: bucket.num_bytes].numpy()
            yield replace(bucket, handle={"object": ray.put(content)})

    def push(self, bucket: WeightBucket) -> None:
        """Engines fetch for themselves."""

    def follow(self, tensors: NamedTensors) -> None:
        """Take part in the gathering."""
        drain(tensors)

    def close(self) -> None:
        """Keep the memory for the next update; Ray frees buckets that nobody holds."""


class FetchedBuckets:
    """The engine's side: memory of this node that takes one bucket at a time."""

    def __init__(self) -> None:
        self.segment: Segment | None = None

    def fetched(self, bucket: WeightBucket) -> WeightBucket:
        """The same bucket in memory of this node; valid until the next one is fetched."""
        try:
            content = ray.get(bucket.handle["object"], timeout=FETCH_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise WeightSyncError(f"a bucket of weights did not come: {error}") from error
        if self.segment is None or self.segment.num_bytes < bucket.num_bytes:
            if self.segment is not None:
                self.segment.close()
            self.segment = Segment(bucket.num_bytes)
        self.segment.write(memoryview(content), 0)
        return replace(bucket, handle=self.segment.handle(part=None))
