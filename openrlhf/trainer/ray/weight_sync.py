"""Weight sync: the trainer's weights to every engine in buckets, and proof that they arrived.

Every rank of the trainer takes part (gathering is collective under ZeRO-3); rank 0 sends. An engine
that cannot show the fingerprints of what was sent fails the sync by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from openrlhf.engines.base import NamedTensors, RolloutEngine, SyncReceipt, WeightBucket
from openrlhf.errors import WeightSyncError
from openrlhf.utils.tensors import fingerprint


class BucketWriter(Protocol):
    """Puts tensors where engines can read them, bucket by bucket."""

    def write(self, tensors: NamedTensors) -> Iterable[WeightBucket]:
        """Buckets of bounded size; each is valid until the next one is asked for."""

    def close(self) -> None:
        """Free the shared memory."""


@dataclass
class SyncReport:
    """What was sent."""

    num_buckets: int = 0
    num_bytes: int = 0
    fingerprints: dict[str, int] = field(default_factory=dict)


def send_weights(
    tensors: NamedTensors,
    engines: Sequence[RolloutEngine],
    weight_version: int,
    *,
    writer: BucketWriter,
) -> SyncReport:
    """Send full named tensors to all engines and check every receipt; raises WeightSyncError."""
    report = SyncReport()
    with ThreadPoolExecutor(max_workers=len(engines)) as pool:

        def on_all(call: Callable[[RolloutEngine], object]) -> list[object]:
            return list(pool.map(call, engines))

        try:
            on_all(lambda engine: engine.begin_weight_update())
            for bucket in writer.write(_fingerprinted(tensors, report)):
                on_all(lambda engine, bucket=bucket: engine.receive_bucket(bucket))  # type: ignore[misc]
                report.num_buckets += 1
                report.num_bytes += bucket.num_bytes
            receipts = on_all(lambda engine: engine.finish_weight_update(weight_version))
        finally:
            writer.close()
    for index, receipt in enumerate(receipts):
        assert isinstance(receipt, SyncReceipt)
        check_receipt(receipt, report, weight_version, engine_name=f"engine {index}")
    return report


def drain(tensors: NamedTensors) -> None:
    """Take part in the gathering of a rank that sends nothing."""
    for _ in tensors:
        pass


def check_receipt(
    receipt: SyncReceipt, report: SyncReport, weight_version: int, *, engine_name: str
) -> None:
    """Raise WeightSyncError, naming the first difference, unless the receipt proves the update."""
    if receipt.weight_version != weight_version:
        raise WeightSyncError(
            f"{engine_name} holds weight version {receipt.weight_version}, sent {weight_version}"
        )
    if not receipt.is_cache_reset:
        raise WeightSyncError(f"{engine_name} kept its prefix cache over a weight update")
    missing = report.fingerprints.keys() - receipt.fingerprints.keys()
    if missing:
        raise WeightSyncError(
            f"{engine_name} did not receive {len(missing)} tensors, e.g. {sorted(missing)[0]}"
        )
    wrong = [
        name for name, value in report.fingerprints.items() if receipt.fingerprints[name] != value
    ]
    if wrong:
        raise WeightSyncError(
            f"{engine_name}: {len(wrong)} tensors differ from the trainer's, e.g. {wrong[0]}"
        )


def _fingerprinted(tensors: NamedTensors, report: SyncReport) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        report.fingerprints[name] = fingerprint(tensor)
        yield name, tensor
