"""Parameters move to shared memory with their values, are trained there, and are read there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from openrlhf.engines import shared_parameters
from openrlhf.engines.shared_memory import (
    NUM_PARTS,
    Segment,
    ShmBucketReader,
    checked_part,
    checksum,
)
from openrlhf.engines.shared_parameters import SharedParameters
from openrlhf.errors import WeightSyncError
from openrlhf.trainer.ray.weight_sync import send_weights
from openrlhf.trainer.ray.weight_transport import SharedMemoryTransport
from tests.engines.helpers import engine_greedy, greedy, load, shake, start


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(16, 16)
        self.k_proj = nn.Linear(16, 8)
        self.v_proj = nn.Linear(16, 8)


def attention() -> nn.ModuleDict:
    return nn.ModuleDict({"layer": nn.ModuleDict({"attention": Attention()})})


def test_values_stay_and_optimizer_steps_change_the_shared_memory():
    model, twin = attention(), attention()
    shared = SharedParameters(model.named_parameters())
    for one in (model, twin):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        for _ in range(3):
            sum(parameter.square().sum() for parameter in one.parameters()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), expected in zip(
        model.named_parameters(), twin.parameters(), strict=True
    ):
        assert torch.equal(parameter, expected), name
        begin = shared.offset_of(parameter)
        assert begin is not None
        memory = shared.segment.mapped()[begin : begin + parameter.nbytes]
        assert torch.equal(memory.view(torch.float32).view(parameter.shape), expected)


def test_weights_of_a_module_lie_end_to_end():
    model = attention()
    shared = SharedParameters(model.named_parameters())
    places = {name: shared.offset_of(p) for name, p in model.named_parameters()}
    prefix = "layer.attention"
    assert places[f"{prefix}.k_proj.weight"] == places[f"{prefix}.q_proj.weight"] + 16 * 16 * 4
    assert places[f"{prefix}.v_proj.weight"] == places[f"{prefix}.k_proj.weight"] + 8 * 16 * 4


def test_parts_of_a_flat_buffer_and_tied_weights_keep_their_relations():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    flat = torch.zeros(32)
    model["c"].weight.data = flat[:16].view(4, 4)
    shared = SharedParameters(model.named_parameters())
    assert model["b"].weight is model["a"].weight
    assert shared.offset_of(model["a"].weight) is not None
    assert shared.offset_of(model["c"].weight) is None
    model["c"].weight.data.add_(1)
    assert flat[:16].eq(1).all()


def test_without_memory_the_others_stay_where_they_are(monkeypatch):
    model, twin = attention(), attention()
    num_moved = []

    class FullSegment(Segment):
        def put(self, data: torch.Tensor, begin: int) -> int:
            if len(num_moved) == 2:
                raise WeightSyncError("no memory for a bucket of weights")
            num_moved.append(begin)
            return super().put(data, begin)

    monkeypatch.setattr(shared_parameters, "Segment", FullSegment)
    shared = SharedParameters(model.named_parameters())
    places = [shared.offset_of(p) for p in model.parameters()]
    assert sum(place is not None for place in places) == 2
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_shared_and_copied_tensors_all_arrive_with_the_trainers_fingerprints():
    model = attention()
    merged = torch.randn(5, 3)  # made for this update, as merged adapters are
    transport = SharedMemoryTransport(2**20)
    transport.share(model.named_parameters())
    tensors = [("merged", merged), *((n, p.data) for n, p in model.named_parameters())]
    reader = ShmBucketReader()
    for step in range(3):
        fingerprints: dict[str, int] = {}
        read = {}
        for bucket in transport.write(tensors, fingerprints):
            part = checked_part(bucket)
            read |= {name: checksum(tensor, part) for name, tensor in reader.read(bucket)}
        assert read == fingerprints == {name: checksum(tensor) for name, tensor in tensors}, step
        for _, tensor in tensors:
            tensor.add_(1)


def test_parts_of_a_large_tensor_are_checked_in_turn_and_all_of_it_first():
    layer = nn.Linear(1000, 3000, bias=False)  # 12 chunks
    transport = SharedMemoryTransport(2**20)
    transport.share([("weight", layer.weight)])
    parts = []
    for _ in range(1 + 2 * NUM_PARTS):
        fingerprints: dict[str, int] = {}
        [bucket] = transport.write([("weight", layer.weight.data)], fingerprints)
        parts.append(checked_part(bucket))
        assert fingerprints == {"weight": checksum(layer.weight, parts[-1])}
    assert parts[0] is None
    assert set(parts[1 : 1 + NUM_PARTS]) == set(range(NUM_PARTS))
    full = checksum(layer.weight)
    for index in range(0, 3_000_000, 100_000):
        before = {part: checksum(layer.weight, part) for part in range(NUM_PARTS)}
        layer.weight.data.view(-1).view(torch.int32)[index] ^= 1
        seen = [part for part in range(NUM_PARTS) if checksum(layer.weight, part) != before[part]]
        is_last_chunk = index * 4 >= 11 << 20
        assert seen == (list(range(NUM_PARTS)) if is_last_chunk else [(index * 4 >> 20) % 4])
        assert checksum(layer.weight) != full
        full = checksum(layer.weight)


@pytest.mark.parametrize("folder", ["tiny_model_dir", "tiny_tied_model_dir"])
def test_an_engine_keeps_what_it_read_while_the_parameters_are_trained_on(request, folder):
    """And reads them again, where they are, at the next update."""
    path = request.getfixturevalue(folder)
    model, engine = load(path), start(path)
    try:
        transport = SharedMemoryTransport(2**20)
        transport.share(model.named_parameters())
        assert transport.shared is not None
        assert all(transport.shared.offset_of(p) is not None for p in model.parameters())
        for version in (1, 2):
            shake(model, seed=version)
            tensors = [(name, p.data) for name, p in model.named_parameters()]
            report = send_weights(tensors, [engine], version, writer=transport)
            assert report.num_buckets == 1
            expected = greedy(model)
            assert engine_greedy(engine) == expected
            shake(model, seed=10 + version)
            assert engine_greedy(engine) == expected != greedy(model)
    finally:
        engine.shutdown()


def test_nothing_to_move_is_no_error():
    shared = SharedParameters([])
    assert shared.offset_of(torch.zeros(3)) is None
