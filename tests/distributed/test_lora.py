"""Adapters under ZeRO: one step changes what it should, and merged weights come out by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from openrlhf.config.common import AdamConfig, DeepSpeedConfig, LoraConfig, OptimizerConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import stored_parameters
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import add_lora
from openrlhf.models.loading import load_causal_lm
from openrlhf.utils.packing import PackedBatch
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model

STAGES = (0, 2, 3)
LORA = LoraConfig(rank=4)
NUM_RANKS = 2


def own_batch(rank: int) -> PackedBatch:
    """Other tokens on each rank."""
    mask = torch.ones(9, dtype=torch.bool)
    mask[0] = False
    return PackedBatch.from_sequences([torch.arange(10, 19) + 20 * rank], [mask])


def step_everywhere(folder: Path) -> dict[object, dict[str, torch.Tensor]]:
    results = {}
    for name, is_checkpointed in [(stage, False) for stage in STAGES] + [("checkpointed", True)]:
        stage = name if isinstance(name, int) else 3
        strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage))
        strategy.setup()
        torch.manual_seed(0)  # of the adapter's A
        actor = Actor(add_lora(load_causal_lm(folder / "model"), LORA))
        if is_checkpointed:
            actor.gradient_checkpointing_enable()
        optim = OptimizerConfig(adam=AdamConfig(lr=1e-2), lr_scheduler="constant")
        engine = strategy.prepare_train(actor, optim, num_updates=4)
        engine.train()
        for _ in range(2):  # B is zero before the first step
            loss = -engine(own_batch(strategy.topology.rank)).logprobs.sum() / 16
            engine.backward(loss, is_last_micro_batch=True)
            engine.step()
        results[name] = {key: value.clone() for key, value in stored_parameters(engine.module)}
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    make_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def stepped(folder: Path) -> list[dict]:
    return run_ranks(step_everywhere, NUM_RANKS, folder)


def test_merged_weights_are_every_weight_of_the_model_once(
    folder: Path, stepped: list[dict]
) -> None:
    expected = {name: p.shape for name, p in load_causal_lm(folder / "model").named_parameters()}
    for results in stepped:
        for weights in results.values():
            assert {name: weight.shape for name, weight in weights.items()} == expected


@pytest.mark.parametrize("other", [2, 3, "checkpointed"])
def test_zero_stages_and_recomputed_activations_take_the_same_step(
    stepped: list[dict], other: object
) -> None:
    for results in stepped:
        for name, weight in results[0].items():
            torch.testing.assert_close(results[other][name], weight, atol=1e-5, rtol=1e-4)
