"""Reward models: one gradient whatever the micro-batches, ranks and ZeRO stage, a scale over all
ranks, and exports that are refused where they give other scores.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from openrlhf.config.cli import parse_config
from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.config.supervised import RMConfig
from openrlhf.datasets.reward_dataset import PreferencePair
from openrlhf.distributed.checkpoints import DataFacts, open_checkpoints
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.errors import CheckpointError
from openrlhf.models.loading import load_sequence_model
from openrlhf.models.value_head import RewardLearner
from openrlhf.trainer.base_trainer import LoopSettings
from openrlhf.trainer.rm_trainer import RMTrainer, check_export
from openrlhf.trainer.supervised_run import SupervisedRun, prepare_inputs, prepare_run
from openrlhf.utils.tracking import NullTracker
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, make_reward_model, write_jsonl
from tests.trainer.gradients import ListedSamples, step_gradient

ZERO_STAGES = (0, 2, 3)
MICRO_BATCH_SIZES = (24, 5, 1)
NUM_PAIRS = 24
EXPORTS = {  # ranks -> name of a run -> its flags
    1: {
        "full": "--zero_stage 0",
        "LoRA": "--zero_stage 0 --lora_rank 4 --value_head_prefix value_head",
    },
    2: {
        "full": "--zero_stage 3 --value_head_prefix value_head",
        "LoRA": "--zero_stage 3 --lora_rank 4",
    },
}


def ragged_pairs() -> ListedSamples:
    """Answers of 2 to 24 tokens, with margins from -0.5 to 1.5."""
    generator = torch.Generator().manual_seed(3)
    pairs = [ragged_pair(generator) for _ in range(NUM_PAIRS)]
    return ListedSamples(pairs, [len(p.chosen_ids) + len(p.rejected_ids) for p in pairs])


def ragged_pair(generator: torch.Generator) -> PreferencePair:
    sides = []
    for _ in range(2):
        size = int(torch.randint(2, 25, (), generator=generator))
        ids = torch.randint(6, 250, (size,), generator=generator)
        sides += [ids, torch.arange(size) > 0]
    return PreferencePair(*sides, float(2 * torch.rand((), generator=generator) - 0.5))


def make_trainer(folder: Path, strategy: DeepSpeedStrategy) -> RMTrainer:
    model = RewardLearner(load_sequence_model(folder / "reward_model"))
    optim = OptimizerConfig(adam=AdamConfig(lr=0.0))
    return RMTrainer(
        strategy,
        strategy.prepare_train(model, optim, num_updates=8),
        with_margin=True,
        samples=ragged_pairs(),
        eval_samples=ragged_pairs(),
        settings=LoopSettings(batch_size=NUM_PAIRS, micro_batch_size=1),
        tracker=NullTracker(),
    )


def prepared(folder: Path, flags: str) -> tuple[RMTrainer, SupervisedRun[RMConfig]]:
    """An untrained run of the command, ready to be exported."""
    words = f"--pretrain {folder}/model --dataset {folder}/pairs.jsonl --ckpt_path {folder}/ckpt"
    config = parse_config(RMConfig, [*words.split(), *flags.split()]).config
    inputs = prepare_inputs(RMTrainer, config)
    strategy = DeepSpeedStrategy(config.ds)
    strategy.setup()
    facts = DataFacts(inputs.samples.fingerprint, len(inputs.samples), config.train.seed)
    run = prepare_run(RMTrainer, config, inputs, strategy, open_checkpoints(config.ckpt, facts))
    return RMTrainer.of(run), run


def export_and_spoil(folder: Path, flags: str) -> str:
    """What the check says of an export whose head is changed afterwards; "" on other ranks."""
    trainer, run = prepared(folder, flags)
    path = folder / flags.replace(" ", "")
    trainer.export(run, path)
    samples = run.inputs.samples
    batch = trainer.collate([samples[0], samples[1]])
    with torch.no_grad():
        expected = run.engine(batch.packed).scores
    if not run.strategy.is_main:
        return ""
    check_export(run, path, batch, expected)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    (head,) = [key for key in tensors if key.endswith(("score.weight", "value_head.weight"))]
    save_file({**tensors, head: tensors[head] * 1.01}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        check_export(run, path, batch, expected)
    return str(caught.value)


def run_everything(folder: Path) -> dict:
    results: dict = {}
    for stage in ZERO_STAGES:
        strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage))
        strategy.setup()
        trainer = make_trainer(folder, strategy)
        for size in MICRO_BATCH_SIZES:
            results[stage, size] = step_gradient(trainer, size)
        trainer.settings = replace(trainer.settings, micro_batch_size=5)
        results[stage, "scale"] = trainer.reward_scale(trainer.samples)
        results[stage, "eval"] = trainer.evaluate()
    for name, flags in EXPORTS[strategy.topology.world_size].items():
        results[name] = export_and_spoil(folder, flags)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rm")
    make_model(folder / "model")
    make_reward_model(folder / "reward_model", initializer_range=0.1)
    rows = [{"chosen": f"{n} is {n}", "rejected": f"{n} is {n + 1}"} for n in range(6)]
    write_jsonl(folder / "pairs.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> list[dict]:
    return run_ranks(run_everything, 1, folder)


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict]:
    return run_ranks(run_everything, 2, folder)


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[Tensor, dict, Tensor]:
    """Gradient, metrics and scores from the formula, in plain torch."""
    auto_class = transformers.AutoModelForSequenceClassification
    model = auto_class.from_pretrained(folder / "reward_model", dtype=torch.float32)
    samples = ragged_pairs()
    pairs = [samples[index] for index in range(NUM_PAIRS)]
    chosen = torch.cat([model(pair.chosen_ids[None]).logits[0] for pair in pairs])
    rejected = torch.cat([model(pair.rejected_ids[None]).logits[0] for pair in pairs])
    margins = torch.tensor([pair.margin for pair in pairs])
    loss = torch.log(1 + torch.exp(-(chosen - rejected - margins))).mean()
    loss.backward()
    values = {
        "loss": loss.item(),
        "acc": (chosen > rejected).float().mean().item(),
        "chosen_reward": chosen.mean().item(),
        "reject_reward": rejected.mean().item(),
    }
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return gradient, values, torch.cat([chosen, rejected]).detach().double()


@pytest.mark.parametrize("size", MICRO_BATCH_SIZES)
@pytest.mark.parametrize("stage", ZERO_STAGES)
@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_gradient_and_metrics_are_those_of_the_formula(
    request: pytest.FixtureRequest, expected: tuple, ranks: str, stage: int, size: int
) -> None:
    gradient, values, _ = expected
    for results in request.getfixturevalue(ranks):
        actual, metrics = results[stage, size]
        assert (actual - gradient).norm() / gradient.norm() < 1e-5
        assert {name: metrics[name] for name in values} == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("stage", ZERO_STAGES)
@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_the_scale_and_an_evaluation_cover_the_pairs_of_all_ranks(
    request: pytest.FixtureRequest, expected: tuple, ranks: str, stage: int
) -> None:
    _, values, scores = expected
    scale = (scores.mean().item(), scores.std(correction=0).item())
    for results in request.getfixturevalue(ranks):
        assert results[stage, "scale"] == pytest.approx(scale, rel=1e-5)
        metrics = results[stage, "eval"]
        assert {name: metrics[f"eval/{name}"] for name in values} == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("name", ["full", "LoRA"])
@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_an_export_whose_head_is_another_is_refused(
    request: pytest.FixtureRequest, ranks: str, name: str
) -> None:
    said, *others = [results[name] for results in request.getfixturevalue(ranks)]
    assert "gives other scores than the one that was trained" in said
    assert not any(others)
