"""A tensor parallel engine of two workers takes weights, and proves what each part holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.errors import WeightSyncError
from tests.engines.helpers import engine_greedy, greedy, load, send, shake, start, weights
from tests.tiny import make_model

vllm_plugin = pytest.importorskip("openrlhf.engines.vllm_plugin")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[], tuple[VLLMEngine, Any]]]:
    """Starts an engine of two workers; answers it and the same model in Hugging Face's hands."""
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
    """The engine answers as the model does, before and after updates."""
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
        live = dict(worker.get_model().named_parameters())
        live["model.layers.0.mlp.down_proj.weight"].data[0, 0] += 1


@pytest.mark.slow
def test_two_workers_with_plain_weights_hold_together_what_was_sent(started, monkeypatch):
    monkeypatch.setattr(
        vllm_plugin, "RECEIPT_EXTENSION", "tests.engines.plain_worker.PlainExtension"
    )
    engine, model = started()
    check_follows(engine, model)
    held = in_workers(engine, "held_bits")
    assert all(bits.sent == held[0].sent != 0 != bits.parts for bits in held)
    assert engine._stepper.check_held(held)
    in_workers(engine, lose_a_value)
    with pytest.raises(WeightSyncError, match="does not hold what was received"):
        engine._stepper.check_held(in_workers(engine, "held_bits"))
