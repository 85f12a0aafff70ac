"""What an engine holds after an update is compared with what was sent, in one worker or in two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.errors import WeightSyncError
from tests.engines.helpers import engine_greedy, greedy, load, send, shake, start, weights
from tests.tiny import make_model

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


@pytest.mark.parametrize("folder", ["tiny_model_dir", "tiny_tied_model_dir"])
def test_an_engine_with_plain_weights_compares_all_of_them(folder, request, monkeypatch):
    """As on a GPU, where no layer is packed."""
    from vllm import _custom_ops

    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    path = request.getfixturevalue(folder)
    engine, model = start(path), load(path)
    worker = engine._stepper.engine.model_executor.driver_worker.worker
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


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[], tuple[VLLMEngine, Any]]]:
    """Starts an engine of two workers; returns it and the same model in Hugging Face's hands."""
    engines = []

    def run() -> tuple[VLLMEngine, Any]:
        folder = make_model(tmp_path / "tied", is_tied=True, num_kv_heads=2)
        engines.append(start(folder, tensor_parallel_size=2))
        return engines[0], load(folder)

    yield run
    engines[0].shutdown()


def in_workers(engine: VLLMEngine, call: Any) -> list[Any]:
    """Call a function of a worker, or a method by name, in both."""
    return engine._stepper.engine.collective_rpc(call)


def check_follows(engine: VLLMEngine, model: Any) -> None:
    """The engine samples as the model does, before and after updates."""
    assert engine_greedy(engine) == greedy(model)
    for version in (1, 2):
        shake(model, version)
        receipt = send(engine, weights(model), version)
        assert receipt.fingerprints.keys() == dict(weights(model)).keys()
        assert engine_greedy(engine) == greedy(model)


def test_two_workers_on_a_cpu_take_weights_the_tied_head_too(started):
    check_follows(*started())


def lose_a_value(worker: Any) -> None:
    """Change a weight of the second worker behind the back of the sync."""
    if worker.rank == 1:
        dict(worker.get_model().named_parameters())[LAST].data[0, 0] += 1


@pytest.mark.slow
def test_two_workers_with_plain_weights_hold_together_what_was_sent(started, monkeypatch):
    monkeypatch.setattr(
        weight_receiver, "WORKER_EXTENSION", "tests.engines.plain_worker.PlainExtension"
    )
    engine, model = started()
    check_follows(engine, model)
    names = dict(weights(model)).keys() - {"lm_head.weight"}
    held = in_workers(engine, "held_sums")
    assert held[0][LAST].is_part and not held[0]["model.norm.weight"].is_part
    assert weight_receiver.check_held(held) == len(held[0]) > len(names) / 2
    in_workers(engine, lose_a_value)
    with pytest.raises(WeightSyncError, match="does not hold what was received"):
        weight_receiver.check_held(in_workers(engine, "held_sums"))
