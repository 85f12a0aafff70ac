"""ZeRO++ (`--zpg`): weights that are whole within a part of the ranks train to the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import stored_parameters
from openrlhf.errors import ConfigError
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from tests.distributed.spawn import run_ranks
from tests.models.helpers import full_batch, random_sequences
from tests.tiny import make_model

pytestmark = pytest.mark.slow

OPTIM = OptimizerConfig(adam=AdamConfig(lr=1e-2, weight_decay=0.1), max_norm=0.5)
CASES = {
    "fp32": {},
    "bf16": {"param_dtype": "bf16"},
    "offload": {"adam_offload": True},
}


def train(options: dict, model_dir: Path) -> tuple[list[Tensor], int]:
    """Weights after three steps beside a frozen model that is split too, and the number of ranks
    that have the weights whole between them.
    """
    strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=3, **options), seed=1)
    strategy.setup()
    reference = strategy.prepare_eval(Actor(load_causal_lm(model_dir)))
    engine = strategy.prepare_train(Actor(load_causal_lm(model_dir)), OPTIM, num_updates=3)
    for step in range(3):
        own = strategy.topology.shard(random_sequences((9, 4, 13, 7), seed=step))
        micro_batches = [full_batch([row]) for row in own]
        for index, batch in enumerate(micro_batches):
            change = engine(batch).logprobs - reference(batch).logprobs
            loss = (change + 1).square().sum() / 30
            engine.backward(loss, is_last_micro_batch=index == len(micro_batches) - 1)
        engine.step()
    num_ranks = next(engine.module.parameters()).ds_secondary_tensor_group_size
    return [t.float().clone() for _, t in stored_parameters(engine.module)], num_ranks


def train_with_and_without(folder: Path) -> dict:
    strategy = DeepSpeedStrategy(DeepSpeedConfig(), seed=1)
    strategy.setup()
    results = {}
    for name, options in CASES.items():
        results[name] = [train({**options, "zpg": zpg}, folder / "model") for zpg in (1, 2)]
    strategy.shut_down()
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_the_weights_are_those_of_zero_3(tmp_path: Path, size: int) -> None:
    make_model(tmp_path / "model", initializer_range=0.2)
    for results in run_ranks(train_with_and_without, size, tmp_path):
        for name, ((without, _), (weights, group)) in results.items():
            assert group == 2, name
            assert all(map(torch.equal, weights, without)), name


def test_ranks_that_cannot_be_divided_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="--zpg 2: 3 ranks cannot be divided"):
        DeepSpeedStrategy(DeepSpeedConfig(zero_stage=3, zpg=2))
    DeepSpeedStrategy(DeepSpeedConfig(zero_stage=2, zpg=2))
