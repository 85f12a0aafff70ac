"""The learning rate ends exactly where its schedule ends, whatever the name and the length."""

from typing import get_args

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from openrlhf.config.common import AdamConfig, OptimizerConfig, Schedule
from openrlhf.distributed.train_engine import make_schedule, resume_schedule

PEAK = 1e-3
END_VALUES = {
    "linear": 0.0,
    "cosine": 0.0,
    "cosine_with_restarts": 0.0,
    "polynomial": 0.1 * PEAK,
    "constant": PEAK,
    "constant_with_warmup": PEAK,
    "cosine_with_min_lr": 0.1 * PEAK,
    "cosine_warmup_with_min_lr": 0.1 * PEAK,
    "warmup_stable_decay": 0.1 * PEAK,
}


def make(name: str, num_updates: int, warmup_ratio: float = 0.1) -> LambdaLR:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    optim = OptimizerConfig(
        lr_scheduler=name, adam=AdamConfig(lr=PEAK), lr_warmup_ratio=warmup_ratio, min_lr_ratio=0.1
    )
    return make_schedule(optimizer, optim, num_updates=num_updates)


def run(rate: LambdaLR, num_updates: int) -> list[float]:
    """The rate each update used, then the one it stands at."""
    used = [rate.get_last_lr()[0]]
    for _ in range(num_updates):
        rate.step()
        used.append(rate.get_last_lr()[0])
    return used


@pytest.mark.parametrize("num_updates", [1, 7, 40])
@pytest.mark.parametrize("name", END_VALUES)
def test_after_the_last_update_the_rate_is_the_end_value(name: str, num_updates: int) -> None:
    used = run(make(name, num_updates), num_updates)
    assert used[-1] == pytest.approx(END_VALUES[name], abs=1e-12)


@pytest.mark.parametrize("name", get_args(Schedule))
def test_every_name_works_and_resumes(name: str) -> None:
    straight = run(make(name, 20), 20)
    first = make(name, 20)
    run(first, 8)
    second = make(name, 20)
    resume_schedule(second, first.state_dict())
    assert run(second, 12) == pytest.approx(straight[8:], abs=1e-15)


def test_a_run_of_one_update_does_not_spend_it_on_warm_up() -> None:
    assert make("cosine_with_min_lr", 1, warmup_ratio=0.03).get_last_lr() == [PEAK]
