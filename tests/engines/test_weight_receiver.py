"""What an engine holds after an update is compared with what was sent."""

from typing import Any

import pytest

from openrlhf.errors import WeightSyncError
from tests.engines.helpers import engine_greedy, greedy, load, send, shake, start, weights

weight_receiver = pytest.importorskip("openrlhf.engines.weight_receiver")
LAST = "model.layers.1.mlp.down_proj.weight"


def test_an_engine_with_plain_weights_compares_all_of_them(tiny_tied_model_dir, monkeypatch):
    """As on a GPU, where no layer is packed."""
    from vllm import _custom_ops

    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    engine, model = start(tiny_tied_model_dir), load(tiny_tied_model_dir)
    worker = engine.llm.model_executor.driver_worker.worker
    receiver = worker.weight_transfer_engine
    try:
        for version in (1, 2, 3):
            shake(model, version)
            send(engine, weights(model), version)
        assert engine_greedy(engine) == greedy(model)
        for name, parameter in worker.get_model().named_parameters():
            first = (0,) * parameter.ndim
            held = parameter.data[first].clone()
            parameter.data[first] += 1
            with pytest.raises(WeightSyncError, match=f"{name} does not hold"):
                receiver._check_held()
            parameter.data[first] = held

        def lose(loaded: Any) -> None:
            dict(loaded.named_parameters())[LAST].data[0, 0] += 1

        monkeypatch.setattr(weight_receiver.vllm_cpu, "after_reload", lose)
        with pytest.raises(WeightSyncError, match=f"{LAST} does not hold what was received"):
            send(engine, weights(model), 4)
    finally:
        engine.shutdown()
