"""ZeRO-3 splits a model while it still is in host memory: no device ever holds all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from openrlhf.config.common import DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import stored_parameters
from tests.distributed.spawn import run_ranks

OFFLOADED = {"frozen at home": {"offload": True}, "frozen at home, ZeRO-2": {"offload": True}}


class Tied(nn.Module):
    """An embedding that also is the head, a buffer, and a part in another type."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 8)
        self.middle = nn.Linear(8, 8).float()
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) * self.scale.to(self.embed.weight.dtype)
        return self.head(torch.tanh(self.middle(hidden)))


def make_model() -> Tied:
    model = Tied().bfloat16()
    model.middle.float()  # as PEFT leaves adapters
    return model


@contextmanager
def whole_moves() -> Iterator[list[int]]:
    """A block that notes how many parameters every `Module.to` moved."""
    moved: list[int] = []
    move = nn.Module.to

    def noted(self: nn.Module, *args: object, **options: object) -> nn.Module:
        moved.append(sum(p.numel() for p in self.parameters()))
        return move(self, *args, **options)

    nn.Module.to = noted  # type: ignore[method-assign]
    try:
        yield moved
    finally:
        nn.Module.to = move  # type: ignore[method-assign]


def load_all(folder: Path) -> dict[str, dict]:
    results = {}
    ids = torch.arange(10)
    for name in ("trained", "frozen", *OFFLOADED):
        stage = 2 if "ZeRO-2" in name else 3
        strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage, param_dtype="bf16"), seed=1)
        strategy.setup()
        with whole_moves() as moved:
            if name == "trained":
                engine = strategy.prepare_train(make_model(), OptimizerConfig(), num_updates=1)
            else:
                engine = strategy.prepare_eval(make_model(), **OFFLOADED.get(name, {}))
        with torch.no_grad():
            answer = engine(ids).float()
        module = engine.module
        results[name] = {
            "moved": moved,
            "answer": answer,
            "is_tied": module.head.weight is module.embed.weight,
            "held": [p.ds_tensor.numel() for p in module.parameters()],
            "dtypes": {p.dtype for p in module.parameters()},
            "full": {name: t.float().clone() for name, t in stored_parameters(engine.module)},
        }
    strategy.shut_down()
    return results


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_is_never_moved_as_a_whole_and_answers_as_before(
    tmp_path: Path, num_ranks: int
) -> None:
    with torch.no_grad():
        expected = make_model().bfloat16()(torch.arange(10)).float()
    for results in run_ranks(load_all, num_ranks, tmp_path):
        for name, found in results.items():
            assert sum(found["moved"]) == 0, name
            assert torch.equal(found["answer"], expected), name
            assert found["is_tied"], name
            assert found["held"] == [320 // num_ranks, 64 // num_ranks, 8 // num_ranks], name
            assert found["dtypes"] == {torch.bfloat16}, name
            assert found["full"].keys() == {"embed.weight", "middle.weight", "middle.bias"}, name
