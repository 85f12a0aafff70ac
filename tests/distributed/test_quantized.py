"""A model loaded in 4 bits is moved, never cast; what cannot be done with one is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from openrlhf.config.common import DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.errors import ConfigError


class FourBitModel(nn.Module):
    """What bitsandbytes leaves of a model: packed bytes, some floats, and transformers' mark."""

    is_quantized = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.packed = nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)

    def save_pretrained(self, path: str) -> None:
        raise AssertionError(path)


def strategy_of(**options: object) -> DeepSpeedStrategy:
    strategy = DeepSpeedStrategy(DeepSpeedConfig(**options))
    strategy.setup()
    return strategy


def test_a_frozen_model_in_four_bits_keeps_its_types() -> None:
    strategy = strategy_of(param_dtype="fp32")
    model = strategy.prepare_eval(FourBitModel()).module
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16, torch.uint8]
    assert strategy.facts_of(model).dtype == torch.bfloat16


def test_four_bits_are_refused_where_weights_are_split() -> None:
    strategy = strategy_of(zero_stage=3)
    line = "--load_in_4bit with --zero_stage 3: .* Type --zero_stage 2"
    with pytest.raises(ConfigError, match=line):
        strategy.prepare_eval(FourBitModel())
    with pytest.raises(ConfigError, match=line):
        strategy.prepare_train(FourBitModel(), OptimizerConfig(), num_updates=1)
