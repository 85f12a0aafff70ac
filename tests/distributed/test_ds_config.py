"""Flags become DeepSpeed's dictionary."""

from __future__ import annotations

import pytest
import torch

from openrlhf.config.common import DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.strategy import (
    ModelFacts,
    effective_stage,
    training_config,
)

FP32 = ModelFacts(torch.float32, num_parameters=1000, hidden_size=8, num_copies=2)
BF16 = ModelFacts(torch.bfloat16, num_parameters=1000, hidden_size=8, num_copies=2)
ALONE = ModelFacts(torch.float32, num_parameters=1000, num_copies=1)


@pytest.mark.parametrize(
    ("stage", "facts", "options", "runs_as"),
    [
        (2, FP32, {}, 2),
        (2, ALONE, {}, 0),
        (3, ALONE, {}, 3),
        (2, ALONE, {"adam_offload": True}, 2),
        (1, BF16, {}, 2),
        (0, BF16, {}, 2),
        (3, BF16, {}, 3),
        (0, FP32, {}, 0),
    ],
)
def test_the_stage_that_runs(stage: int, facts: ModelFacts, options: dict, runs_as: int):
    assert effective_stage(DeepSpeedConfig(zero_stage=stage, **options), facts) == runs_as


def test_sixteen_bit_gradients_are_summed_in_fp32_unless_the_user_says_otherwise():
    config = training_config(DeepSpeedConfig(), OptimizerConfig(), BF16)
    assert config["bf16"]["enabled"] and config["data_types"] == {"grad_accum_dtype": "fp32"}
    asked = training_config(DeepSpeedConfig(grad_accum_dtype="bf16"), OptimizerConfig(), BF16)
    assert asked["data_types"] == {"grad_accum_dtype": "bf16"}
