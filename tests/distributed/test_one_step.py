"""One optimizer step of GRPO and of DPO leaves the same weights however ranks divide the work:
rows shared, layers split, optimizer states and weights sharded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.distributed.weights import stored_parameters
from openrlhf.trainer.ray.model_actor import RankIdentity
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from tests.distributed.spawn import run_ranks
from tests.distributed.test_policy_gradients import own_steps
from tests.trainer.test_gradients import make_folder, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Updates that do not hang on the sign of a gradient near zero.
OPTIM = {"adam": {"lr": 1e-3, "eps": 1e-2}, "lr_scheduler": "constant"}
NUM_SAMPLES = 64


class Division(NamedTuple):
    """How a world divides the work."""

    name: str
    zero_stage: int
    cp: int = 1
    tp: int = 1

    @property
    def ds(self) -> dict[str, int]:
        return {
            "zero_stage": self.zero_stage,
            "ring_attn_size": self.cp,
            "tensor_parallel_size": self.tp,
        }


DIVISIONS = {
    1: [Division("one rank", 0)],
    4: [
        *(Division("2 dp x 2 cp", stage, cp=2) for stage in (0, 2, 3)),
        *(Division("2 cp x 2 tp", stage, cp=2, tp=2) for stage in (0, 2)),
    ],
}
Weights = dict[str, Tensor]


def weights_of(engine: TrainEngine) -> Weights:
    return {name: tensor.clone() for name, tensor in stored_parameters(engine.module)}


def after_grpo(folder: Path, division: Division) -> Weights:
    world_size = int(os.environ["WORLD_SIZE"])
    actor = {"model_name_or_path": str(folder / "model"), "max_norm": 0.5, **OPTIM}
    config = PPOConfig.model_validate(
        {
            "actor": actor,
            "ds": division.ds,
            "algo": {
                "advantage": {"estimator": "group_norm"},
                "kl": {"use_loss": True, "estimator": "k3"},
            },
            "train": {"micro_batch_size": 3},
        }
    )
    worker = PolicyModelActor(config, RankIdentity("actor", 0, world_size, str(folder)))
    worker.setup()
    worker.init_model(num_updates=1000)
    worker.fit(own_steps(worker, NUM_SAMPLES), 0.1)
    return weights_of(worker.engine)


def after_dpo(folder: Path, division: Division) -> Weights:
    flags = f"--zero_stage {division.zero_stage} --ring_attn_size {division.cp} --max_norm 0.5 "
    flags += f"--ds_tensor_parallel_size {division.tp} --learning_rate 1e-3 --adam.eps 1e-2 "
    trainer, _ = start(folder, "dpo", flags + "--lr_scheduler constant")
    trainer.train_step(range(len(trainer.samples)))
    return weights_of(trainer.engine)


def run_divisions(folder: Path) -> dict[tuple[str, Division], Weights]:
    found = {}
    for division in DIVISIONS[int(os.environ["WORLD_SIZE"])]:
        for method, step in (("grpo", after_grpo), ("dpo", after_dpo)):
            found[method, division] = step(folder, division)
    torch.distributed.barrier()
    return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict]]:
    folder = tmp_path_factory.mktemp("one_step")
    make_folder(folder, num_heads=4, num_kv_heads=2)
    before = _loaded(folder / "model")
    worlds = {size: run_ranks(run_divisions, size, folder) for size in DIVISIONS}
    for weights in worlds[1][0].values():
        moved = max((weights[name] - before[name]).abs().max().item() for name in before)
        assert moved > 1e-4, "the step changed nothing"
    return worlds  # type: ignore[return-value]


def _loaded(path: Path) -> Weights:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(path).state_dict())


@pytest.mark.parametrize("division", DIVISIONS[4], ids=lambda d: f"{d.name}, ZeRO-{d.zero_stage}")
@pytest.mark.parametrize("method", ["grpo", "dpo"])
def test_a_step_leaves_the_weights_of_one_rank(
    worlds: dict, method: str, division: Division
) -> None:
    expected = worlds[1][0][method, DIVISIONS[1][0]]
    for rank, found in enumerate(worlds[4]):
        actual = found[method, division]
        assert actual.keys() == expected.keys()
        for name, tensor in actual.items():
            error = (tensor - expected[name]).abs().max().item()
            assert error < 1e-5, f"rank {rank}, {name}: {error:.1e}"
