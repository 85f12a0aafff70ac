"""Every family of models learns in SFT, reward modelling and DPO, full and LoRA, and ZeRO changes
nothing of what it learns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest
import torch

from openrlhf.algorithms.preference_loss import PreferenceOptions, preference_loss
from openrlhf.config.common import AdamConfig, DeepSpeedConfig, LoraConfig, OptimizerConfig
from openrlhf.datasets.reward_dataset import PreferencePair
from openrlhf.datasets.sft_dataset import SFTExample
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import add_lora
from openrlhf.models.loading import load_causal_lm, load_sequence_model
from openrlhf.models.value_head import RewardLearner
from openrlhf.trainer.base_trainer import BaseTrainer, LoopParts, LoopSettings
from openrlhf.trainer.dpo_trainer import DPOTrainer
from openrlhf.trainer.preference import Reference
from openrlhf.trainer.rm_trainer import RMTrainer
from openrlhf.trainer.sft_trainer import SFTTrainer
from openrlhf.utils.tracking import NullTracker
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model
from tests.trainer.gradients import ListedSamples

PADDED = ("bloom", "qwen3_next")  # position biases; a state, and experts
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "mixtral", *PADDED)
ZERO_STAGES = (0, 2, 3)
LORA_RANKS = (0, 4)
NUM_RANKS, NUM_SAMPLES, NUM_UPDATES = 2, 4, 2
LEARNING_RATES = {0: 2e-3, 4: 5e-3}  # LoRA rank -> rate
OPTIONS = {"lr_scheduler": "constant", "lr_warmup_ratio": 0.0}


def make_texts(seed: int) -> list[SFTExample]:
    """Five to eight tokens, the first two a prompt."""
    generator = torch.Generator().manual_seed(seed)
    sizes = range(5, 5 + NUM_SAMPLES)
    return [
        SFTExample(torch.randint(6, 250, (size,), generator=generator), torch.arange(size) > 1)
        for size in sizes
    ]


def loop(samples: list, lengths: list[int]) -> LoopParts:
    own = ListedSamples(samples, lengths)
    settings = LoopSettings(batch_size=NUM_SAMPLES, micro_batch_size=1)
    return LoopParts(samples=own, eval_samples=own, settings=settings, tracker=NullTracker())


def text_loop() -> LoopParts:
    texts = make_texts(0)
    return loop(texts, [len(text.token_ids) for text in texts])


def pair_loop() -> LoopParts:
    sides = list(zip(make_texts(0), make_texts(1), strict=True))
    pairs = [PreferencePair(*vars(a).values(), *vars(b).values(), 0.0) for a, b in sides]
    return loop(pairs, [len(a.token_ids) + len(b.token_ids) for a, b in sides])


def make_sft(path: Path, strategy: DeepSpeedStrategy, rank: int, optim: OptimizerConfig):
    actor = Actor(add_lora(load_causal_lm(path), LoraConfig(rank=rank)))
    engine = strategy.prepare_train(actor, optim, num_updates=NUM_UPDATES)
    return SFTTrainer(strategy, engine, **text_loop())


def make_rm(path: Path, strategy: DeepSpeedStrategy, rank: int, optim: OptimizerConfig):
    model = RewardLearner(add_lora(load_sequence_model(path), LoraConfig(rank=rank)))
    engine = strategy.prepare_train(model, optim, num_updates=NUM_UPDATES)
    return RMTrainer(strategy, engine, **pair_loop())


def make_dpo(path: Path, strategy: DeepSpeedStrategy, rank: int, optim: OptimizerConfig):
    actor = Actor(add_lora(load_causal_lm(path), LoraConfig(rank=rank)))
    engine = strategy.prepare_train(actor, optim, num_updates=NUM_UPDATES)
    if rank:
        reference = Reference(engine, actor)
    else:
        reference = Reference(strategy.prepare_eval(Actor(load_causal_lm(path))))
    loss = preference_loss("sigmoid", PreferenceOptions(beta=0.5))
    return DPOTrainer(strategy, engine, loss=loss, reference=reference, **pair_loop())


MAKERS = {"sft": make_sft, "rm": make_rm, "dpo": make_dpo}


def losses_of(trainer: BaseTrainer) -> list[float]:
    """The loss of one batch before each of the updates and after the last."""
    name = "gpt_loss" if isinstance(trainer, SFTTrainer) else "loss"
    losses = [
        trainer._reduced(trainer.train_step(range(NUM_SAMPLES)))[name] for _ in range(NUM_UPDATES)
    ]
    return [*losses, trainer.evaluate()[f"eval/{name}"]]


def train(folder: Path, families: Iterable[str], names: Iterable[str], stages: Iterable[int]):
    """(family, trainer, ZeRO stage, LoRA rank) -> losses."""
    curves = {}
    for stage in stages:
        strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage))
        strategy.setup()
        for family, name, rank in product(families, names, LORA_RANKS):
            optim = OptimizerConfig(adam=AdamConfig(lr=LEARNING_RATES[rank]), **OPTIONS)
            torch.manual_seed(0)  # of the adapter's A
            trainer = MAKERS[name](folder / family, strategy, rank, optim)
            curves[family, name, stage, rank] = losses_of(trainer)
    return curves


def train_all(folder: Path) -> dict:
    return train(folder, FAMILIES, MAKERS, ZERO_STAGES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        wider = {"initializer_range": 0.1} if family == "bloom" else {}  # or adapters move little
        make_model(folder / family, family, hidden_size=32, **wider)
    return folder


def check(curves: dict, family: str, name: str, stage: int, rank: int) -> None:
    losses = curves[family, name, stage, rank]
    assert all(map(math.isfinite, losses))
    assert losses == sorted(losses, reverse=True) and losses[0] - losses[-1] > 0.01
    assert losses == pytest.approx(curves[family, name, 0, rank], rel=1e-4)


@pytest.fixture(scope="module")
def everything(folder: Path) -> list[dict]:
    return run_ranks(train_all, NUM_RANKS, folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", LORA_RANKS)
@pytest.mark.parametrize("stage", ZERO_STAGES)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_alike_for_every_zero_stage(
    everything: list[dict], family: str, name: str, stage: int, rank: int
) -> None:
    for curves in everything:
        check(curves, family, name, stage, rank)
