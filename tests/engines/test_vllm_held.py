"""Plain parameters are compared with what was sent, however vLLM merges or cuts them."""

from __future__ import annotations

import pytest
import torch

from openrlhf.errors import WeightSyncError
from tests.engines.helpers import engine_greedy, greedy, load, send, shake, start, weights

vllm_held = pytest.importorskip("openrlhf.engines.vllm_held")
HeldBits = vllm_held.HeldBits


def test_a_sum_of_bits_is_that_of_the_parts():
    tensor = torch.randn(6, 4)
    parts = [tensor[:1], tensor[1:4], tensor[4:]]
    assert vllm_held.bit_sum(parts) == vllm_held.bit_sum([tensor])
    columns = [tensor[:, :2], tensor[:, 2:]]
    assert vllm_held.bit_sum(columns) == vllm_held.bit_sum([tensor])
    changed = tensor.clone()
    changed.view(torch.int32)[3, 3] ^= 1
    assert vllm_held.bit_sum([changed]) != vllm_held.bit_sum([tensor])


def test_bytes_beyond_the_last_word_count():
    three = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert vllm_held.bit_sum([three]) == 1 + 2 * 256 + 3 * 65_536


def test_workers_hold_together_what_was_sent():
    good = [HeldBits(sent=10, whole=4, parts=1), HeldBits(sent=10, whole=4, parts=5)]
    assert vllm_held.check_held(good)
    assert vllm_held.check_held([HeldBits(sent=3, whole=2**64 - 1, parts=4)])  # modulo 2^64
    assert not vllm_held.check_held([good[0], None])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (HeldBits(10, 4, 6), "does not hold what was received"),
        (HeldBits(10, 5, 5), "hold different weights"),
        (HeldBits(11, 4, 5), "hold different weights"),
    ],
)
def test_workers_that_do_not_are_refused(second, message):
    with pytest.raises(WeightSyncError, match=message):
        vllm_held.check_held([HeldBits(10, 4, 1), second])


@pytest.fixture(params=["tiny_model_dir", "tiny_tied_model_dir"])
def plain_engine(request, monkeypatch):
    """An engine as on a GPU: nothing is packed, vLLM's own reload replaces the weights."""
    from vllm import _custom_ops

    from openrlhf.engines import vllm_plugin

    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    monkeypatch.setattr(vllm_plugin, "InPlaceUpdate", vllm_plugin.LayerwiseUpdate)
    folder = request.getfixturevalue(request.param)
    engine = start(folder)
    worker = engine._stepper.engine.model_executor.driver_worker.worker
    worker.weight_transfer_engine.is_in_place = False
    yield engine, load(folder), worker
    engine.shutdown()


def test_an_engine_with_plain_weights_is_compared_at_every_update(plain_engine, monkeypatch):
    engine, model, worker = plain_engine
    for version in (1, 2, 3):
        shake(model, version)
        send(engine, weights(model), version)
        held = worker.held_bits()
        assert held is not None and held.sent == held.whole != 0
    assert engine_greedy(engine) == greedy(model)
    real = worker.weight_transfer_engine.update.finish

    def finish_and_lose(names):
        real(names)
        live = dict(worker.get_model().named_parameters())
        live["model.layers.0.mlp.down_proj.weight"].data[0, 0] += 1

    monkeypatch.setattr(worker.weight_transfer_engine.update, "finish", finish_and_lose)
    with pytest.raises(WeightSyncError, match="does not hold what was received"):
        send(engine, weights(model), 4)
