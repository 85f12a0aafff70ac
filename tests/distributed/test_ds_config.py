"""Flags become DeepSpeed's dictionary; a user's JSON is completed or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from openrlhf.config.common import DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.strategy import (
    ModelFacts,
    effective_stage,
    training_config,
)
from openrlhf.errors import ConfigError

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


def write(path: Path, tree: object) -> DeepSpeedConfig:
    path.write_text(json.dumps(tree))
    return DeepSpeedConfig(zero_stage=2, config=str(path))


def test_auto_is_filled_and_other_keys_are_kept(tmp_path: Path) -> None:
    ds = write(
        tmp_path / "ds.json",
        {
            "train_batch_size": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 123, "overlap_comm": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            "comms_logger": {"enabled": True},
        },
    )
    config = training_config(ds, OptimizerConfig(), ALONE)
    assert config["gradient_clipping"] == 1.0
    assert config["zero_optimization"]["stage"] == 2
    assert config["zero_optimization"]["reduce_bucket_size"] == 123
    assert config["zero_optimization"]["overlap_comm"] is False
    assert config["comms_logger"] == {"enabled": True}
    assert not {"scheduler", "optimizer"} & config.keys()  # they are made outside


def test_every_contradiction_is_named_with_its_flag(tmp_path: Path) -> None:
    ds = write(
        tmp_path / "ds.json",
        {
            "zero_optimization": {"stage": 3},
            "gradient_clipping": 5.0,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        },
    )
    with pytest.raises(ConfigError) as caught:
        training_config(ds, OptimizerConfig(), FP32)
    lines = caught.value.problems
    assert len(lines) == 3
    assert "zero_optimization.stage is 3, but --zero_stage decides it" in lines[0]
    assert "gradient_clipping is 5.0, but --max_norm decides it" in lines[1]
    assert "warmup_num_steps is 10, but --lr_warmup_ratio decides it" in lines[2]


def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    ds = write(tmp_path / "ds.json", [1])
    with pytest.raises(ConfigError, match=r"--deepspeed_config .* is not a JSON object"):
        training_config(ds, OptimizerConfig(), FP32)
