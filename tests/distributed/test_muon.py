"""Muon: which parameters it moves, orthogonal steps, the same ones in every ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from openrlhf.config.common import AdamConfig, DeepSpeedConfig, MuonConfig, OptimizerConfig
from openrlhf.distributed.muon import check_muon, embeddings_and_heads, muon_groups
from openrlhf.distributed.strategy import DeepSpeedStrategy, parameter_groups
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.errors import ConfigError
from tests.distributed.spawn import run_ranks

STAGES = {
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero2-bf16": {"zero_stage": 2, "param_dtype": "bf16"},
}
OPTIM = OptimizerConfig(
    optim="muon",
    adam=AdamConfig(lr=1e-2, weight_decay=0.1),
    muon=MuonConfig(lr=0.05),
    lr_scheduler="constant",
    max_norm=0.1,
)
NUM_STEPS = 10
NUM_SAMPLES = 12
TARGETS = torch.arange(NUM_SAMPLES) % 8


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 8))


def loss_of(model: object, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(rows).float(), TARGETS[rows], reduction="sum") / 12


def train(options: dict, folder: Path) -> dict:
    strategy = DeepSpeedStrategy(DeepSpeedConfig(**options), seed=1)
    strategy.setup()
    engine = strategy.prepare_train(make_model(), OPTIM, num_updates=NUM_STEPS)
    losses, first_steps = [], {}
    before = weights_of(engine)
    for step in range(NUM_STEPS):
        losses.append(take_step(engine, strategy))
        if step == 0:
            first_steps = {name: w - before[name] for name, w in weights_of(engine).items()}
    engine.save_states(folder)
    at_save = weights_of(engine)
    take_step(engine, strategy)
    after_save = weights_of(engine)
    engine.load_states(folder)
    restored = weights_of(engine)
    take_step(engine, strategy)
    return {
        "losses": losses,
        "first_steps": first_steps,
        "weights": at_save,
        "restored": restored,
        "after_save": after_save,
        "after_restore": weights_of(engine),
    }


def take_step(engine: TrainEngine, strategy: DeepSpeedStrategy) -> float:
    total = 0.0
    micro_batches = strategy.topology.shard(torch.arange(NUM_SAMPLES).split(3))
    for index, rows in enumerate(micro_batches):
        loss = loss_of(engine, rows)
        total += loss.item()
        engine.backward(loss, is_last_micro_batch=index == len(micro_batches) - 1)
    engine.step()
    return strategy.all_reduce_sum({"loss": total})["loss"]


def weights_of(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.float().clone() for name, tensor in engine.gather_full_parameters()}


def train_all(folder: Path) -> dict:
    return {name: train(options, folder / name) for name, options in STAGES.items()}


@pytest.fixture(scope="module", params=[1, 2], ids=["1rank", "2ranks"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_ranks(train_all, request.param, tmp_path_factory.mktemp("muon"))


@pytest.mark.parametrize("case", STAGES)
def test_the_loss_falls_in_ten_steps(results: list[dict], case: str) -> None:
    for rank_results in results:
        losses = rank_results[case]["losses"]
        assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize("case", STAGES)
def test_the_first_step_of_a_hidden_matrix_is_orthogonal(results: list[dict], case: str) -> None:
    step = results[0][case]["first_steps"]["1.weight"]
    # rate * sqrt(48 / 16) * (singular values that five iterations bring into 0.7 to 1.2), on a
    # gradient whose own singular values are far apart
    values = torch.linalg.svdvals(step)[:8] / (0.05 * 3**0.5)
    assert values.min() > 0.6 and values.max() < 1.3, values
    # The embedding's step is Adam's first: the rate, in the direction of the sign.
    embedding = results[0][case]["first_steps"]["0.weight"][:NUM_SAMPLES]
    torch.testing.assert_close(embedding.abs().median(), torch.tensor(0.01), atol=1e-3, rtol=0)


@pytest.mark.parametrize("case", ["zero1", "zero2"])
def test_every_stage_and_world_gives_the_same_weights(results: list[dict], case: str) -> None:
    reference = results[0]["zero0"]["weights"]
    for rank_results in results:
        for name, tensor in rank_results[case]["weights"].items():
            torch.testing.assert_close(tensor, reference[name], atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("case", STAGES)
def test_a_restored_run_takes_the_same_next_step(results: list[dict], case: str) -> None:
    found = results[0][case]
    for name, tensor in found["weights"].items():
        assert torch.equal(found["restored"][name], tensor)
        torch.testing.assert_close(
            found["after_restore"][name], found["after_save"][name], atol=1e-6, rtol=0
        )
