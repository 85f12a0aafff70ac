"""A tensor parallel engine of two workers takes weights, and proves what each part holds."""

from __future__ import annotations

from typing import Any

import pytest

from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.errors import WeightSyncError
from tests.engines.helpers import engine_greedy, greedy, load, send, shake, start, weights

pytest.importorskip("vllm")


def stop_packing(worker: Any) -> None:
    """Keep the next weights plain, as they are on a GPU; runs in each worker."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


def lose_a_value(worker: Any) -> None:
    """Change a weight of the second worker behind the back of the sync."""
    if worker.rank == 1:
        live = dict(worker.get_model().named_parameters())
        live["model.layers.0.mlp.down_proj.weight"].data[0, 0] += 1


def in_workers(engine: VLLMEngine, call: Any) -> list[Any]:
    """Call a function of a worker, or a method by name, in both."""
    return engine._stepper.engine.collective_rpc(call)


def test_two_workers_hold_together_what_was_sent(tiny_tied_model_dir):
    engine = start(tiny_tied_model_dir, tensor_parallel_size=2)
    try:
        model = load(tiny_tied_model_dir)
        assert engine_greedy(engine) == greedy(model)
        shake(model, 1)
        receipt = send(engine, weights(model), 1)
        assert receipt.fingerprints.keys() == dict(weights(model)).keys()
        assert engine_greedy(engine) == greedy(model)
        in_workers(engine, stop_packing)
        for version in (2, 3):
            shake(model, version)
            send(engine, weights(model), version)
            held = in_workers(engine, "held_bits")
            assert all(bits.sent == held[0].sent != 0 and bits.parts for bits in held)
        assert engine_greedy(engine) == greedy(model)
        in_workers(engine, lose_a_value)
        with pytest.raises(WeightSyncError, match="does not hold what was received"):
            engine._stepper.check_held(in_workers(engine, "held_bits"))
    finally:
        engine.shutdown()
