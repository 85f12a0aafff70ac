"""One optimizer step leaves the same weights where ranks share rows and layers at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from openrlhf.distributed.weights import stored_parameters
from tests.distributed.spawn import run_ranks
from tests.trainer.test_gradients import make_folder, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STAGES = (0, 2)


def after_dpo(folder: Path, flags: str) -> dict[str, Tensor]:
    # Updates that do not hang on the sign of a gradient near zero.
    flags += " --max_norm 0.5 --learning_rate 1e-3 --adam.eps 1e-2 --lr_scheduler constant"
    trainer = start(folder, "dpo", flags)
    trainer.train_step(range(len(trainer.samples)))
    return {name: t.clone() for name, t in stored_parameters(trainer.engine.module)}


def alone(folder: Path) -> dict[str, Tensor]:
    return after_dpo(folder, "--zero_stage 0")


def shared_and_split(folder: Path) -> list[dict[str, Tensor]]:
    flags = "--ring_attn_size 2 --ds_tensor_parallel_size 2 --zero_stage"
    found = [after_dpo(folder, f"{flags} {stage}") for stage in STAGES]
    torch.distributed.barrier()
    return found


def test_two_by_two_ranks_leave_the_weights_of_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_folder(tmp_path, num_heads=4, num_kv_heads=2)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    [expected] = run_ranks(alone, 1, tmp_path)
    moved = max((expected[name] - before[name]).abs().max().item() for name in before)
    assert moved > 1e-4, "the step changed nothing"
    for rank, each in enumerate(run_ranks(shared_and_split, 4, tmp_path)):
        for stage, found in zip(STAGES, each, strict=True):
            assert found.keys() == expected.keys()
            for name, tensor in found.items():
                error = (tensor - expected[name]).abs().max().item()
                assert error < 1e-5, f"rank {rank}, ZeRO-{stage}, {name}: {error:.1e}"
