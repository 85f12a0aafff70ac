"""Weight sync: the trainer's weights to every engine in buckets, and proof that they arrived.

Every rank of the trainer takes part (gathering is collective under ZeRO-3); rank 0 sends. An engine
that cannot show the fingerprints of what was sent fails the sync by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from openrlhf.engines.base import NamedTensors, RolloutEngine, SyncReceipt, WeightBucket
from openrlhf.errors import WeightSyncError

Answer = TypeVar("Answer")


class BucketWriter(Protocol):
    """Puts tensors where engines can read them, bucket by bucket."""

    @property
    def fills_ahead(self) -> bool:
        """Whether a bucket stays readable while the next one is filled."""

    def write(self, tensors: NamedTensors, fingerprints: dict[str, int]) -> Iterable[WeightBucket]:
        """Buckets of bounded size; each is valid until the next one is asked for, or the next but
        one with `fills_ahead`.

        `fingerprints` is given that of every tensor, taken from the trainer's own memory the way
        the engines on the other side take it.
        """

    def push(self, bucket: WeightBucket) -> None:
        """Send what is not read by the engines themselves; all are receiving the bucket now."""

    def close(self) -> None:
        """Free the memory."""


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
    keep_running: bool = False,
) -> SyncReport:
    """Send full named tensors to all engines and check every receipt; raises WeightSyncError, also
    when requests run, unless `keep_running`: then they go on under the new weights.
    """
    report = SyncReport()
    pool = ThreadPoolExecutor(max_workers=len(engines))

    def on_all(call: Callable[[RolloutEngine], Answer]) -> list[Future[Answer]]:
        return [pool.submit(call, engine) for engine in engines]

    try:
        all_results(on_all(partial(_begin, keep_running=keep_running)))
        receiving: list[Future[None]] = []
        for bucket in writer.write(tensors, report.fingerprints):
            all_results(receiving)
            receiving = on_all(partial(_receive, bucket))
            writer.push(bucket)
            if not writer.fills_ahead:
                all_results(receiving)
            report.num_buckets += 1
            report.num_bytes += bucket.num_bytes
        all_results(receiving)
        receipts = all_results(on_all(lambda engine: engine.finish_weight_update(weight_version)))
    finally:
        writer.close()
        pool.shutdown(wait=False)
    for engine, receipt in zip(engines, receipts, strict=True):
        check_receipt(receipt, report, weight_version, engine_name=engine.who)
    return report


def all_results(calls: Sequence[Future[Answer]]) -> list[Answer]:
    """What the calls answer, or the first error at once: peers of a failed one may hang."""
    done, _ = wait(calls, return_when=FIRST_EXCEPTION)
    for call in calls:
        if call in done:
            call.result()
    return [call.result() for call in calls]


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


def _begin(engine: RolloutEngine, *, keep_running: bool) -> None:
    engine.begin_weight_update(keep_running=keep_running)


def _receive(bucket: WeightBucket, engine: RolloutEngine) -> None:
    engine.receive_bucket(bucket)
