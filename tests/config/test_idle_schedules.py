"""Which settings a schedule reads, seen from the rates that it gives."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD

from openrlhf.config.checks import SCHEDULERS
from openrlhf.config.cli import parse_config
from openrlhf.config.common import AdamConfig, OptimizerConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.distributed.schedule import LearningRate


def curve(**settings: object) -> list[float]:
    """Learning rates of a run whose loss rises."""
    optim = OptimizerConfig(adam=AdamConfig(lr=1.0), **settings)
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rate, rates = LearningRate(optimizer, optim, num_updates=300), []
    for update in range(300):
        rates.append(rate.value)
        optimizer.step()
        rate.step(float(update))
    return rates


@pytest.mark.parametrize("leaf", ["min_lr_ratio", "lr_warmup_ratio"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_reads_what_no_notice_calls_idle(name, leaf):
    low, high = (curve(lr_scheduler=name, **{leaf: value}) for value in (0.2, 0.6))
    words = f"--pretrain m --dataset d --lr_scheduler {name} --{leaf} 0.2".split()
    assert (low == high) == bool(parse_config(SFTConfig, words).notices)
