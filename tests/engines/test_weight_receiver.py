"""What an engine holds after an update is compared with what was sent."""

from __future__ import annotations

import pytest

from openrlhf.errors import WeightSyncError
from tests.engines.helpers import engine_greedy, greedy, load, send, shake, start, weights

weight_receiver = pytest.importorskip("openrlhf.engines.weight_receiver")
HeldSum = weight_receiver.HeldSum
LAST = "model.layers.1.mlp.down_proj.weight"


def workers(*sums: HeldSum) -> list[dict[str, HeldSum]]:
    return [{"a": held} for held in sums]


def test_workers_hold_together_what_was_sent():
    assert weight_receiver.check_held(workers(HeldSum(10, 10, False), HeldSum(10, 10, False))) == 1
    assert weight_receiver.check_held(workers(HeldSum(10, 4, True), HeldSum(10, 6, True))) == 1
    high = 2**64 - 1  # sums are modulo 2^64
    assert weight_receiver.check_held(workers(HeldSum(3, high, True), HeldSum(3, 4, True))) == 1
    assert weight_receiver.check_held([{}]) == 0


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (HeldSum(10, 7, True), "a does not hold what was received"),
        (HeldSum(11, 6, True), "received different weights: a"),
    ],
)
def test_workers_that_do_not_are_refused(second, message):
    with pytest.raises(WeightSyncError, match=message):
        weight_receiver.check_held(workers(HeldSum(10, 4, True), second))
    with pytest.raises(WeightSyncError, match="a does not hold what was received"):
        weight_receiver.check_held(workers(HeldSum(10, 10, False), HeldSum(10, 9, False)))


def test_an_engine_with_plain_weights_compares_all_of_them(tiny_tied_model_dir, monkeypatch):
    """As on a GPU, where no layer is packed."""
    from vllm import _custom_ops

    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    engine, model = start(tiny_tied_model_dir), load(tiny_tied_model_dir)
    worker = engine.llm.model_executor.driver_worker.worker
    try:
        for version in (1, 2, 3):
            shake(model, version)
            send(engine, weights(model), version)
            assert worker.held_sums().keys() == dict(worker.get_model().named_parameters()).keys()
        assert engine_greedy(engine) == greedy(model)
        receiver = worker.weight_transfer_engine
        finish = receiver.finish_weight_update

        def finish_and_lose() -> None:
            finish()
            dict(worker.get_model().named_parameters())[LAST].data[0, 0] += 1

        monkeypatch.setattr(receiver, "finish_weight_update", finish_and_lose)
        with pytest.raises(WeightSyncError, match=f"{LAST} does not hold what was received"):
            send(engine, weights(model), 4)
    finally:
        engine.shutdown()
