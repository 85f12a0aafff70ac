"""Shared rows and split layers over NCCL, by the bodies of the tests on CPU ranks."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from openrlhf.distributed.collectives import shut_down
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.utils.context_parallel import ContextGroup
from tests.distributed.spawn import run_ranks
from tests.helpers import shared_rows as shared
from tests.helpers import split_layers as split
from tests.models.helpers import command
from tests.tiny import make_model

pytestmark = pytest.mark.gpu

MODES = ("ring", "ulysses")
NUM_HEADS = {"num_heads": 8, "num_kv_heads": 4}


def rows_on_gpus(folder: Path) -> list:
    """Every row alone and shared by all ranks."""
    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    model = Actor(load_causal_lm(folder / "qwen2", command(param_dtype="fp32"))).to(device)
    found = []
    for lengths in shared.ROWS.values():
        batch = shared.batch_of(lengths).to(device)
        model.context = None
        alone = shared.outcome(model, batch)
        for mode in MODES:
            model.context = ContextGroup(dist.group.WORLD, mode)  # type: ignore[arg-type]
            results, gradient = shared.outcome(model, batch)
            dist.all_reduce(gradient)
            found.append((alone, (results, gradient)))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_a_row_shared_over_nccl_is_the_row_of_one_rank(num_gpus: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    make_model(tmp_path / "qwen2", initializer_range=0.1, **NUM_HEADS)  # type: ignore[arg-type]
    for found in run_ranks(rows_on_gpus, num_gpus, tmp_path):
        for (expected, gradient), (actual, own) in found:  # type: ignore[attr-defined]
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
            assert (own - gradient).norm() / gradient.norm() < 1e-3


def bf16_alone(folder: Path) -> dict:
    return train_in_bf16(folder, 1)


def bf16_split(folder: Path) -> dict:
    return train_in_bf16(folder, 2)


def train_in_bf16(folder: Path, size: int) -> dict:
    options = {"zero_stage": 0, "tensor_parallel_size": size, "param_dtype": "bf16"}
    found = split.train(folder, "qwen2", options)
    shut_down()
    return {name: found[name] for name in ("norms", "said", "frozen")}


def test_split_layers_in_bf16_stay_near_whole_ones(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    make_model(tmp_path / "qwen2", initializer_range=0.1, **NUM_HEADS)  # type: ignore[arg-type]
    [alone] = run_ranks(bf16_alone, 1, tmp_path)
    for found in run_ranks(bf16_split, 2, tmp_path):
        assert found["norms"] == pytest.approx(alone["norms"], rel=0.05)  # type: ignore[index]
        for name in ("said", "frozen"):
            torch.testing.assert_close(found[name], alone[name], rtol=0, atol=0.1)  # type: ignore[index]
