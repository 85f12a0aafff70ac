"""Metrics of micro-batches and ranks combine exactly, as numbers or as tensors that nobody read."""

import pickle

import pytest
import torch

from openrlhf.utils.metrics import Metrics, merged

ADDED = [
    ("loss", 0.5, {"weight": 3}),
    ("count", 2.0, {"reduction": "sum"}),
    ("loss", 0.25, {"weight": 1}),
    ("largest", -1.0, {"reduction": "max"}),
    ("largest", 4.0, {"reduction": "max"}),
]


@pytest.mark.parametrize("number", [float, torch.tensor], ids=["numbers", "tensors"])
def test_a_mean_carries_its_weight_through_ranks(number) -> None:
    ranks = [Metrics(), Metrics()]
    for index, (name, value, how) in enumerate(ADDED):
        ranks[index % 2].add(name, number(value), **how)
    sent = [pickle.loads(pickle.dumps(metrics)) for metrics in ranks]
    assert merged(sent).values() == {"loss": 1.75 / 4, "count": 2.0, "largest": 4.0}
    assert "loss" in ranks[0] and ranks[0]["loss"] == 1.75 / 4
