"""DPO and relatives: one gradient whatever the micro-batches, ranks and ZeRO stage, and it is that
of the formula on one unpacked answer at a time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from openrlhf.algorithms.preference_loss import PreferenceOptions, preference_loss
from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.datasets.reward_dataset import PreferencePair
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.base_trainer import LoopSettings
from openrlhf.trainer.dpo_trainer import DPOTrainer
from openrlhf.trainer.preference import Reference
from openrlhf.utils.tracking import NullTracker
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model
from tests.trainer.gradients import ListedSamples, response_logprob, step_gradient

ZERO_STAGES = (0, 2, 3)
MICRO_BATCH_SIZES = (64, 8, 1)
NUM_PAIRS = 64
BETA, NLL_COEF = 0.3, 0.5


def ragged_pairs() -> ListedSamples:
    """Prompts of 1 to 9 tokens; answers of 1 to 14 tokens."""
    generator = torch.Generator().manual_seed(3)
    pairs = [ragged_pair(generator) for _ in range(NUM_PAIRS)]
    return ListedSamples(pairs, [len(p.chosen_ids) + len(p.rejected_ids) for p in pairs])


def ragged_pair(generator: torch.Generator) -> PreferencePair:
    prompt = torch.randint(
        6, 250, (int(torch.randint(1, 10, (), generator=generator)),), generator=generator
    )
    sides = []
    for _ in range(2):
        size = int(torch.randint(1, 15, (), generator=generator))
        ids = torch.cat([prompt, torch.randint(6, 250, (size,), generator=generator)])
        sides += [ids, torch.arange(len(ids)) >= len(prompt)]
    return PreferencePair(*sides, 0.0)


def make_trainer(folder: Path, strategy: DeepSpeedStrategy) -> DPOTrainer:
    optim = OptimizerConfig(adam=AdamConfig(lr=0.0))
    samples = ragged_pairs()
    return DPOTrainer(
        strategy,
        strategy.prepare_train(Actor(load_causal_lm(folder / "model")), optim, num_updates=8),
        loss=preference_loss("sigmoid", PreferenceOptions(beta=BETA)),
        reference=Reference(strategy.prepare_eval(Actor(load_causal_lm(folder / "other")))),
        nll_coef=NLL_COEF,
        samples=samples,
        eval_samples=samples,
        settings=LoopSettings(batch_size=NUM_PAIRS, micro_batch_size=1),
        tracker=NullTracker(),
    )


def run_everything(folder: Path) -> dict:
    results: dict = {}
    for stage in ZERO_STAGES:
        strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage))
        strategy.setup()
        trainer = make_trainer(folder, strategy)
        for size in MICRO_BATCH_SIZES:
            results[stage, size] = step_gradient(trainer, size)
        trainer.precompute_reference()
        assert trainer.reference is None
        results[stage, "precomputed"] = step_gradient(trainer, 8)
        results[stage, "eval"] = trainer.evaluate()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dpo")
    make_model(folder / "model", initializer_range=0.1)
    make_model(folder / "other", initializer_range=0.1, seed=1)
    return folder


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> list[dict]:
    return run_ranks(run_everything, 1, folder)


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict]:
    return run_ranks(run_everything, 2, folder)


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[Tensor, dict]:
    """Gradient and metrics from the formula, in plain torch and float64."""
    model, other = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        for name in ("model", "other")
    )
    losses, nll, num_tokens, ratios = [], 0.0, 0, []
    samples = ragged_pairs()
    for pair in (samples[index] for index in range(NUM_PAIRS)):
        sides = [(pair.chosen_ids, pair.chosen_mask), (pair.rejected_ids, pair.rejected_mask)]
        own = [response_logprob(model, *side) for side in sides]
        with torch.no_grad():
            fixed = [response_logprob(other, *side) for side in sides]
        gap = (own[0] - fixed[0]) - (own[1] - fixed[1])
        losses.append(torch.log(1 + torch.exp(-BETA * gap)))
        ratios.append([(a - b).item() for a, b in zip(own, fixed, strict=True)])
        nll, num_tokens = nll - own[0], num_tokens + int(pair.chosen_mask.sum())
    loss = torch.stack(losses).mean()
    (loss + NLL_COEF * nll / num_tokens).backward()
    chosen, rejected = BETA * torch.tensor(ratios).T
    values = {
        "loss": loss.item(),
        "nll_loss": (nll / num_tokens).item(),
        "acc": (chosen > rejected).float().mean().item(),
        "chosen_reward": chosen.mean().item(),
        "reject_reward": rejected.mean().item(),
    }
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), values


@pytest.mark.parametrize("case", [*MICRO_BATCH_SIZES, "precomputed"])
@pytest.mark.parametrize("stage", ZERO_STAGES)
@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_gradient_and_metrics_are_those_of_the_formula(
    request: pytest.FixtureRequest, expected: tuple, ranks: str, stage: int, case: object
) -> None:
    gradient, values = expected
    for results in request.getfixturevalue(ranks):
        actual, metrics = results[stage, case]
        assert (actual - gradient).norm() / gradient.norm() < 1e-5
        assert {name: metrics[name] for name in values} == pytest.approx(values, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_an_evaluation_has_the_metrics_of_the_formula(
    request: pytest.FixtureRequest, expected: tuple, ranks: str
) -> None:
    values = {f"eval/{name}": value for name, value in expected[1].items()}
    for results in request.getfixturevalue(ranks):
        metrics = results[3, "eval"]
        assert {name: metrics[name] for name in values} == pytest.approx(values, rel=1e-5, abs=1e-6)
