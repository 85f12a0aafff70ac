"""ZeRO++ (`--zpg`): weights that are whole within a part of the ranks train to the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.errors import ConfigError
from tests.distributed.spawn import run_ranks
from tests.models.helpers import tiny_model

pytestmark = pytest.mark.slow

OPTIM = OptimizerConfig(adam=AdamConfig(lr=1e-2, weight_decay=0.1), max_norm=0.5)
CASES = {
    "fp32": {},
    "bf16": {"param_dtype": "bf16"},
    "offload": {"adam_offload": True},
}


def train(options: dict, model_dir: Path) -> tuple[list[Tensor], bool]:
    """Weights after three steps beside a frozen model that is split too, and whether the engine has
    them whole within a part of the ranks.
    """
    from openrlhf.models.loading import load_causal_lm

    strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=3, **options), seed=1)
    strategy.setup()
    reference = strategy.prepare_eval(load_causal_lm(model_dir))
    engine = strategy.prepare_train(load_causal_lm(model_dir), OPTIM, num_updates=3)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(0, 200, (4, 9), generator=generator)
        for index, part in enumerate(rows[strategy.topology.rank :: 4].split(1)):
            del index
            change = engine(part).logits - reference(part).logits
            loss = (engine(part).logits.float().logsumexp(-1).mean() + change.float().mean()) / 4
            engine.backward(loss, is_last_micro_batch=True)
        engine.step()
    group = next(engine.module.parameters()).ds_secondary_tensor_group_size
    return [t.float().clone() for _, t in engine.gather_full_parameters()], group


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
    tiny_model(tmp_path / "model", "qwen2")
    for results in run_ranks(train_with_and_without, size, tmp_path):
        for name, ((without, _), (weights, group)) in results.items():
            assert group == 2, name
            assert all(map(torch.equal, weights, without)), name


def test_ranks_that_cannot_be_divided_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="--zpg 2: 3 ranks cannot be divided"):
        DeepSpeedStrategy(DeepSpeedConfig(zero_stage=3, zpg=2))
    DeepSpeedStrategy(DeepSpeedConfig(zero_stage=2, zpg=2))
