"""A sync is only over when every engine has shown what it holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from openrlhf.engines.base import NamedTensors, SyncReceipt, WeightBucket
from openrlhf.errors import WeightSyncError
from openrlhf.trainer.ray.weight_sync import send_weights
from openrlhf.utils.tensors import fingerprint

WEIGHTS = [("a.weight", torch.arange(6.0)), ("b.weight", torch.ones(2, 2))]


class InProcessWriter:
    """Hands tensors over in the handle itself, one tensor a bucket."""

    is_closed = False
    fills_ahead = False

    def write(self, tensors: NamedTensors, fingerprints: dict[str, int]) -> Iterator[WeightBucket]:
        for name, tensor in tensors:
            fingerprints[name] = fingerprint(tensor)
            yield WeightBucket(
                (name,), ("float32",), (tuple(tensor.shape),), (0,), tensor.nbytes, {"t": tensor}
            )

    def push(self, bucket: WeightBucket) -> None:
        """Nothing to send."""

    def close(self) -> None:
        self.is_closed = True


class FakeEngine:
    """Keeps what it receives; can be told to misbehave."""

    who = "vllm-0"

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.held: dict[str, torch.Tensor] = {}

    def begin_weight_update(self, *, keep_running: bool = False) -> None:
        self.keeps_running = keep_running
        self.held.clear()

    def receive_bucket(self, bucket: WeightBucket) -> None:
        if self.fault == "drop" and self.held:
            return
        tensor = bucket.handle["t"]
        self.held[bucket.names[0]] = tensor + 1 if self.fault == "corrupt" else tensor

    def finish_weight_update(self, weight_version: int) -> SyncReceipt:
        prints = {name: fingerprint(tensor) for name, tensor in self.held.items()}
        receipt = SyncReceipt(weight_version, prints, is_cache_reset=True)
        if self.fault == "stale":
            return replace(receipt, weight_version=weight_version - 1)
        return replace(receipt, is_cache_reset=self.fault != "cache")


def test_good_engines_pass() -> None:
    writer = InProcessWriter()
    report = send_weights(WEIGHTS, [FakeEngine(), FakeEngine()], 3, writer=writer)
    assert report.num_buckets == 2
    assert report.num_bytes == 40
    assert writer.is_closed


@pytest.mark.parametrize("keep_running", [False, True])
def test_engines_are_told_whether_running_requests_go_on(keep_running: bool) -> None:
    engines = [FakeEngine(), FakeEngine()]
    send_weights(WEIGHTS, engines, 3, writer=InProcessWriter(), keep_running=keep_running)
    assert [engine.keeps_running for engine in engines] == [keep_running] * 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("drop", "did not receive 1 tensors, e.g. b.weight"),
        ("corrupt", "2 tensors differ from the trainer's, e.g. a.weight"),
        ("stale", "holds weight version 2, sent 3"),
        ("cache", "kept its prefix cache"),
    ],
)
def test_an_engine_without_proof_is_refused_by_name(fault: str, message: str) -> None:
    engine = FakeEngine(fault)
    engine.who = "vllm-1 on node n"
    with pytest.raises(WeightSyncError, match=f"^vllm-1 on node n.*{message}"):
        send_weights(WEIGHTS, [FakeEngine(), engine], 3, writer=InProcessWriter())


class OrderedWriter(InProcessWriter):
    """Notes when a bucket is asked for."""

    def __init__(self, *, fills_ahead: bool) -> None:
        self.fills_ahead = fills_ahead
        self.asked: list[str] = []
        self.is_next_asked = threading.Event()

    def write(self, tensors: NamedTensors, fingerprints: dict[str, int]) -> Iterator[WeightBucket]:
        for bucket in super().write(tensors, fingerprints):
            self.asked.append(bucket.names[0])
            if len(self.asked) > 1:
                self.is_next_asked.set()
            yield bucket


class SlowEngine(FakeEngine):
    """Notes what was asked of the writer by the time the first bucket has been read."""

    def __init__(self, writer: OrderedWriter, wait_s: float) -> None:
        super().__init__()
        self.writer = writer
        self.wait_s = wait_s
        self.seen: list[list[str]] = []

    def receive_bucket(self, bucket: WeightBucket) -> None:
        if not self.held:
            self.writer.is_next_asked.wait(self.wait_s)
        self.seen.append(list(self.writer.asked))
        super().receive_bucket(bucket)


@pytest.mark.parametrize(
    ("fills_ahead", "wait_s", "at_first"),
    [(True, 30.0, ["a.weight", "b.weight"]), (False, 0.2, ["a.weight"])],
)
def test_a_bucket_is_filled_while_the_last_is_read_where_that_is_safe(
    fills_ahead: bool, wait_s: float, at_first: list[str]
) -> None:
    writer = OrderedWriter(fills_ahead=fills_ahead)
    engine = SlowEngine(writer, wait_s)
    send_weights([*WEIGHTS, ("c.weight", torch.zeros(3))], [engine], 3, writer=writer)
    assert engine.seen[0] == at_first  # never two ahead


def test_an_engine_that_fails_while_the_next_bucket_is_filled_fails_the_sync() -> None:
    class Broken(FakeEngine):
        def receive_bucket(self, bucket: WeightBucket) -> None:
            raise WeightSyncError(f"no room for {bucket.names[0]}")

    writer = OrderedWriter(fills_ahead=True)
    with pytest.raises(WeightSyncError, match="no room for"):
        send_weights(WEIGHTS, [Broken()], 3, writer=writer)
    assert writer.is_closed
