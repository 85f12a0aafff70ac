"""Supervised training end to end: exact gradients for any split, a loss that falls, a model that
loads.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from openrlhf.config.cli import parse_config
from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.datasets.sft_dataset import SFTExample
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import stored_parameters
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.base_trainer import LoopSettings
from openrlhf.trainer.sft_trainer import SFTTrainer
from openrlhf.trainer.supervised_run import prepare_inputs, run_supervised
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.tracking import NullTracker
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, write_jsonl
from tests.trainer.gradients import ListedSamples, caught_gradients

ZERO_STAGES = (0, 2, 3)
NUM_SAMPLES = 64
MICRO_BATCH_SIZES = (64, 8, 1)
NUM_ROWS = 21  # 16 + 5: the last batch of an epoch is smaller
FLAGS = (
    "--input_key input --output_key output --train_batch_size 16 --micro_train_batch_size 3 "
    "--learning_rate 1e-2 --max_epochs 4 --lr_warmup_ratio 0"
)


def ragged_samples() -> ListedSamples:
    """Random sequences of 2 to 40 tokens, each with its own targets."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 41, (NUM_SAMPLES,), generator=generator).tolist()
    return ListedSamples([ragged_sample(n, generator) for n in lengths], lengths)


def ragged_sample(length: int, generator: torch.Generator) -> SFTExample:
    mask = torch.rand(length, generator=generator) < 0.6
    mask[0], mask[-1] = False, True
    return SFTExample(torch.randint(6, 250, (length,), generator=generator), mask)


def make_trainer(model_dir: Path, zero_stage: int, micro_batch_size: int) -> SFTTrainer:
    strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=zero_stage))
    strategy.setup()
    actor = Actor(load_causal_lm(model_dir))
    optim = OptimizerConfig(adam=AdamConfig(lr=1e-3))
    return SFTTrainer(
        strategy,
        strategy.prepare_train(actor, optim, num_updates=4),
        samples=ragged_samples(),
        settings=LoopSettings(batch_size=NUM_SAMPLES, micro_batch_size=micro_batch_size),
        tracker=NullTracker(),
    )


def step_gradients(trainer: SFTTrainer) -> list[Tensor]:
    with caught_gradients(trainer) as caught:
        trainer.train_step(range(NUM_SAMPLES))
    return caught


def poisoned_step(trainer: SFTTrainer) -> tuple[bool, Metrics]:
    """A step whose loss is not a number on the main rank only: are the weights as before?"""
    compute_loss = trainer.compute_loss
    before = [tensor.clone() for _, tensor in stored_parameters(trainer.engine.module)]

    def poisoned(*args: object) -> tuple[Tensor, Metrics]:
        loss, metrics = compute_loss(*args)
        return loss * (math.nan if trainer.strategy.is_main else 1.0), metrics

    trainer.compute_loss = poisoned  # type: ignore[method-assign]
    metrics = trainer.train_step(range(8))
    after = [tensor for _, tensor in stored_parameters(trainer.engine.module)]
    return all(map(torch.equal, before, after)), metrics


def run_config(folder: Path, world_size: int) -> SFTConfig:
    paths = {
        "pretrain": folder / "model",
        "dataset": folder / "train.jsonl",
        "eval_dataset": folder / "eval.jsonl",
        "save_path": folder / f"run{world_size}",
    }
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    return parse_config(SFTConfig, [*FLAGS.split(), *words]).config


def run_everything(folder: Path) -> dict:
    results: dict = {}
    for stage in ZERO_STAGES:
        for size in MICRO_BATCH_SIZES:
            trainer = make_trainer(folder / "model", stage, size)
            results[stage, size] = step_gradients(trainer)
        results["poisoned", stage] = poisoned_step(make_trainer(folder / "model", stage, 8))
    run_supervised(SFTTrainer, run_config(folder, trainer.strategy.topology.world_size))
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    make_model(folder / "model")
    rows = [{"input": f"{i}+{i}=", "output": str(2 * i)} for i in range(NUM_ROWS)]
    write_jsonl(folder / "train.jsonl", rows)
    write_jsonl(folder / "eval.jsonl", rows[:5])
    return folder


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> list[dict]:
    return run_ranks(run_everything, 1, folder)


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict]:
    return run_ranks(run_everything, 2, folder)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tensor:
    """Gradient of the token mean, one sample at a time, in plain torch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    samples = ragged_samples()
    num_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    for sample in samples:
        logprobs = model(sample.token_ids[None]).logits[0, :-1].log_softmax(-1)
        picked = logprobs.gather(-1, sample.token_ids[1:, None])[:, 0]
        (-picked[sample.loss_mask[1:]].sum() / num_tokens).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def read_metrics(folder: Path, world_size: int) -> list[dict]:
    lines = (folder / f"run{world_size}" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("size", MICRO_BATCH_SIZES)
@pytest.mark.parametrize("stage", ZERO_STAGES)
@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_the_gradient_does_not_depend_on_micro_batches_ranks_or_zero_stage(
    request: pytest.FixtureRequest, expected: Tensor, ranks: str, stage: int, size: int
) -> None:
    for results in request.getfixturevalue(ranks):
        gradient = torch.cat([g.flatten() for g in results[stage, size]])
        error = (gradient - expected).norm() / expected.norm()
        assert error < 1e-5


@pytest.mark.parametrize("stage", ZERO_STAGES)
def test_a_bad_loss_on_one_rank_skips_the_step_on_all(two_ranks: list[dict], stage: int) -> None:
    for results in two_ranks:
        is_unchanged, metrics = results["poisoned", stage]
        assert is_unchanged and metrics.values() == {}


def test_the_loss_falls_and_is_logged_every_step(folder: Path, one_rank: list[dict]) -> None:
    records = read_metrics(folder, 1)
    losses = [record["gpt_loss"] for record in records if "gpt_loss" in record]
    assert len(losses) == 4 * 2  # ceil(21 / 16) updates in each of 4 epochs
    assert losses[0] > 5.0
    assert losses[-1] < 3.0
    evals = [record for record in records if "eval/gpt_loss" in record]
    assert [record["step"] for record in evals] == [2, 4, 6, 8]
    assert evals[-1]["eval/ppl"] == pytest.approx(math.exp(evals[-1]["eval/gpt_loss"]))
    assert records[-2]["lr"] == pytest.approx(1e-3, abs=1e-12)


def test_two_ranks_train_as_one(folder: Path, one_rank: list[dict], two_ranks: list[dict]) -> None:
    for alone, together in zip(read_metrics(folder, 1), read_metrics(folder, 2), strict=True):
        for name in {"gpt_loss", "grad_norm", "lr", "eval/gpt_loss"} & alone.keys():
            assert together[name] == pytest.approx(alone[name], rel=1e-4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_export_loads_and_has_the_loss_that_was_logged(
    request: pytest.FixtureRequest, folder: Path, world_size: int
) -> None:
    request.getfixturevalue({1: "one_rank", 2: "two_ranks"}[world_size])
    run_dir = folder / f"run{world_size}"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        run_dir, output_loading_info=True
    )
    assert not any(info.values())
    total, count = 0.0, 0
    for sample in prepare_inputs(SFTTrainer, run_config(folder, world_size)).eval_samples:
        logprobs = model(sample.token_ids[None]).logits[0, :-1].log_softmax(-1)
        picked = logprobs.gather(-1, sample.token_ids[1:, None])[:, 0][sample.loss_mask[1:]]
        total, count = total - picked.sum().item(), count + len(picked)
    logged = [r["eval/gpt_loss"] for r in read_metrics(folder, world_size) if "eval/ppl" in r]
    assert total / count == pytest.approx(logged[-1], rel=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(run_dir).chat_template
    card = (run_dir / "README.md").read_text()
    assert "transformers" in card and "Trained from `model`" in card
    assert (run_dir / "config.yaml").is_file()


def test_the_cap_on_rows_is_one_for_training_and_for_evaluation(folder: Path) -> None:
    config = run_config(folder, 1)
    capped = config.model_copy(update={"data": config.data.model_copy(update={"max_samples": 3})})
    inputs = prepare_inputs(SFTTrainer, capped)
    assert (len(inputs.samples), len(inputs.eval_samples)) == (3, 3)  # of 21 and 5


def test_a_token_budget_bounds_micro_batches() -> None:
    settings = LoopSettings(batch_size=8, micro_batch_size=1, max_tokens=10)
    assert settings.cut([6, 4, 5, 5]) == [[0, 1], [2, 3]]
