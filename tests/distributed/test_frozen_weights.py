"""Checkpoints leave frozen weights out, and go back only into a model that trains the same ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from openrlhf.config.common import DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.distributed.weights import stored_parameters
from openrlhf.errors import CheckpointError

STAGES = (0, 3)


def make_engine(stage: int, frozen: int, seed: int) -> TrainEngine:
    """Two layers, one of them frozen."""
    strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage), seed=seed)
    strategy.setup()
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[frozen].requires_grad_(False)
    return strategy.prepare_train(model, OptimizerConfig(), num_updates=3)


def weights_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in stored_parameters(engine.module)}


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_weights_are_not_saved_and_those_of_the_start_stay(
    tmp_path: Path, stage: int
) -> None:
    first = make_engine(stage, frozen=0, seed=1)
    first.save_states(tmp_path / "model")
    if stage == 0:
        [path] = (tmp_path / "model").glob("*model_states.pt")
        saved = torch.load(path, weights_only=False)["module"]
        assert set(saved) == {"1.weight", "1.bias"}
    assert json.loads((tmp_path / "model" / "engine.json").read_text())["trained"] == [
        "1.bias",
        "1.weight",
    ]
    second = make_engine(stage, frozen=0, seed=2)
    before, expected = weights_of(second), weights_of(first)
    second.load_states(tmp_path / "model")
    found = weights_of(second)
    assert torch.equal(found["1.weight"], expected["1.weight"])
    assert torch.equal(found["0.weight"], before["0.weight"])
    assert not torch.equal(found["0.weight"], expected["0.weight"])


def test_a_checkpoint_of_other_trained_weights_is_refused(tmp_path: Path) -> None:
    make_engine(0, frozen=0, seed=1).save_states(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"0\.bias is trained in one of the two only"):
        make_engine(0, frozen=1, seed=1).load_states(tmp_path / "model")
