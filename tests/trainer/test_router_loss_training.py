"""The router loss in training: its exact share of the policy's gradient, and SFT that lowers it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from openrlhf.config.cli import parse_config
from openrlhf.config.supervised import SFTConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.checkpointing import DataFacts, open_checkpoints
from openrlhf.trainer.sft_trainer import SFTRecipe
from openrlhf.trainer.supervised_run import prepare_inputs, prepare_run
from tests.tiny import make_model, write_jsonl
from tests.trainer.test_policy_updates import gradients, make_actor, ragged_experience

COEF = 0.5


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("moe"), "mixtral", hidden_size=32, initializer_range=0.2
    )


def test_the_policy_gradient_gains_the_coefficient_times_the_router_gradient(
    mixtral: Path, tmp_path: Path
) -> None:
    experience = ragged_experience(24)
    with_loss, without = (
        gradients(make_actor(mixtral, tmp_path, actor={"aux_loss_coef": coef}), experience, 24)
        for coef in (COEF, 0.0)
    )
    reference = Actor(load_causal_lm(mixtral), with_aux_loss=True)
    reference(experience.packed()).aux_loss.backward()
    # The head and the final norm stand behind the routers: they get none of it.
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()]
    expected = torch.cat([part.flatten() for part in parts])
    assert expected.norm() > 0.01
    torch.testing.assert_close(with_loss - without, COEF * expected, atol=1e-5, rtol=1e-4)


def test_every_sample_counts_for_the_router_loss(mixtral: Path, tmp_path: Path) -> None:
    actor = make_actor(mixtral, tmp_path, actor={"aux_loss_coef": COEF})
    experience = ragged_experience(8)
    idle = experience.with_columns(advantages=torch.zeros_like(experience.advantages))
    assert gradients(actor, idle, 8).norm() > 0.01


def train(config: SFTConfig) -> None:
    """`run_sft` without its export."""
    recipe = SFTRecipe()
    inputs = prepare_inputs(recipe, config)
    strategy = DeepSpeedStrategy(config.ds, seed=1)
    strategy.setup()
    facts = DataFacts(inputs.samples.fingerprint, len(inputs.samples), seed=1)
    opened = open_checkpoints(config.ckpt, facts)
    run = prepare_run(recipe, config, inputs, strategy, opened)
    recipe.make_trainer(run).fit()


def test_fine_tuning_balances_the_experts(mixtral: Path, tmp_path: Path) -> None:
    rows = [{"input": f"{i}+{i}=", "output": str(2 * i)} for i in range(16)]
    data = write_jsonl(tmp_path / "train.jsonl", rows)
    line = (
        f"--pretrain {mixtral} --dataset {data} --input_key input --output_key output "
        f"--save_path {tmp_path / 'run'} --aux_loss_coef 1 --optim muon --muon.lr 0.02 "
        "--learning_rate 1e-2 --train_batch_size 16 --micro_train_batch_size 8 --max_epochs 8 "
        "--gradient_checkpointing --ds.experts_implementation batched_mm"
    )
    train(parse_config(SFTConfig, line.split()).config)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, *_, last = [json.loads(line) for line in lines]
    assert first["aux_loss"] > 2.02  # two experts a token: 2 is perfect balance
    assert last["aux_loss"] - 2 < (first["aux_loss"] - 2) / 2
    assert last["gpt_loss"] < first["gpt_loss"] - 1
