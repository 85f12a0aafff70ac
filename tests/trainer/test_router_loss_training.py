"""The router loss in training: its exact share of every gradient, whatever the micro-batches and
ranks, and SFT that lowers it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from openrlhf.algorithms.distillation import Distillation
from openrlhf.algorithms.preference_loss import KTOOptions, PreferenceOptions, preference_loss
from openrlhf.config.cli import parse_config
from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.distributed.checkpoints import DataFacts, open_checkpoints
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.models.actor import Actor
from openrlhf.models.distillation import Student, Teacher
from openrlhf.models.loading import load_causal_lm, load_sequence_model
from openrlhf.models.process_reward import StepJudge
from openrlhf.models.value_head import RewardLearner
from openrlhf.trainer.base_trainer import LoopParts, LoopSettings
from openrlhf.trainer.dpo_trainer import DPOTrainer
from openrlhf.trainer.kd_trainer import KDTrainer
from openrlhf.trainer.kto_trainer import KTOTrainer
from openrlhf.trainer.preference import Reference
from openrlhf.trainer.prm_trainer import PRMTrainer
from openrlhf.trainer.rm_trainer import RMTrainer
from openrlhf.trainer.sft_trainer import SFTTrainer
from openrlhf.trainer.supervised_run import prepare_inputs, prepare_run
from openrlhf.utils.tracking import NullTracker
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, write_jsonl
from tests.trainer.gradients import step_gradient
from tests.trainer.test_dpo_trainer import ragged_pairs
from tests.trainer.test_kto_prm_kd_gradients import answers, judged_texts, labelled_answers, loop
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
    batch = experience.packed()
    losses_B, weights_B = reference(batch).aux_loss, batch.num_targets
    ((losses_B * weights_B).sum() / weights_B.sum()).backward()
    # The head and the final norm stand behind the routers: they get none of it.
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()]
    expected = torch.cat([part.flatten() for part in parts])
    assert expected.norm() > 0.01
    torch.testing.assert_close(with_loss - without, COEF * expected, atol=1e-5, rtol=1e-4)


def test_the_policy_gradient_does_not_depend_on_micro_batches(
    mixtral: Path, tmp_path: Path
) -> None:
    actor = make_actor(mixtral, tmp_path, actor={"aux_loss_coef": COEF})
    experience = ragged_experience(24)
    whole, *others = (gradients(actor, experience, size) for size in (24, 5, 1))
    for other in others:
        assert (other - whole).norm() / whole.norm() < 1e-5


def make_sft(folder: Path, strategy: DeepSpeedStrategy, engine: Callable) -> SFTTrainer:
    actor = Actor(load_causal_lm(folder / "model"), with_aux_loss=True)
    return SFTTrainer(strategy, engine(actor), aux_loss_coef=COEF, **loop(answers()))


def make_dpo(folder: Path, strategy: DeepSpeedStrategy, engine: Callable) -> DPOTrainer:
    actor = Actor(load_causal_lm(folder / "model"), with_aux_loss=True)
    loss = preference_loss("simpo", PreferenceOptions())
    pairs = ragged_pairs()
    parts = LoopParts(samples=pairs, settings=SETTINGS, tracker=NullTracker(), aux_loss_coef=COEF)
    return DPOTrainer(strategy, engine(actor), loss=loss, reference=None, **parts)


def make_rm(folder: Path, strategy: DeepSpeedStrategy, engine: Callable) -> RMTrainer:
    model = load_sequence_model(folder / "model")
    torch.nn.init.normal_(model.score.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    learner = RewardLearner(model, with_aux_loss=True)
    parts = LoopParts(samples=ragged_pairs(), settings=SETTINGS, tracker=NullTracker())
    return RMTrainer(strategy, engine(learner), aux_loss_coef=COEF, **parts)


def make_kto(folder: Path, strategy: DeepSpeedStrategy, engine: Callable) -> KTOTrainer:
    reference = Reference(strategy.prepare_eval(Actor(load_causal_lm(folder / "other"))))
    return KTOTrainer(
        strategy,
        engine(Actor(load_causal_lm(folder / "model"), with_aux_loss=True)),
        reference=reference,
        options=KTOOptions(0.1, 1.0, 1.5),
        max_len=36,
        aux_loss_coef=COEF,
        **loop(labelled_answers()),
    )


def make_prm(folder: Path, strategy: DeepSpeedStrategy, engine: Callable) -> PRMTrainer:
    judge = StepJudge(load_causal_lm(folder / "model"), with_aux_loss=True)
    texts = loop(judged_texts(is_any_token=True))
    return PRMTrainer(strategy, engine(judge), aux_loss_coef=COEF, **texts)


def make_kd(folder: Path, strategy: DeepSpeedStrategy, engine: Callable) -> KDTrainer:
    student = Student(
        load_causal_lm(folder / "model"), coef=0.4, method=Distillation(), with_aux_loss=True
    )
    teacher = strategy.prepare_eval(Teacher(load_causal_lm(folder / "other")))
    return KDTrainer(
        strategy, engine(student), teacher=teacher, aux_loss_coef=COEF, **loop(answers())
    )


MAKERS = {
    "sft": make_sft,
    "dpo": make_dpo,
    "rm": make_rm,
    "kto": make_kto,
    "prm": make_prm,
    "kd": make_kd,
}
SETTINGS = LoopSettings(batch_size=64, micro_batch_size=1)


def step_gradients(folder: Path) -> dict:
    """Gradient and router loss of a step of every trainer, in large micro-batches and small."""
    strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=0))
    strategy.setup()
    optim = OptimizerConfig(adam=AdamConfig(lr=0.0))
    results = {}
    for name, make in MAKERS.items():
        trainer = make(
            folder, strategy, lambda model: strategy.prepare_train(model, optim, num_updates=8)
        )
        for size in (64, 3):
            gradient, metrics = step_gradient(trainer, size)
            results[name, size] = gradient, metrics["aux_loss"]
    return results


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict]]:
    """What `step_gradients` answers on one rank and on two."""
    folder = tmp_path_factory.mktemp("ranks")
    for seed, name in enumerate(("model", "other")):
        make_model(folder / name, "mixtral", hidden_size=32, initializer_range=0.2, seed=seed)
    return {size: run_ranks(step_gradients, size, folder) for size in (1, 2)}


@pytest.mark.parametrize("name", MAKERS)
def test_no_trainer_s_gradient_depends_on_micro_batches_or_ranks(worlds: dict, name: str) -> None:
    whole, aux_loss = worlds[1][0][name, 64]
    assert aux_loss > 2.1  # two experts a token, used unevenly
    for results in (*worlds[1], *worlds[2]):
        for size in (64, 3):
            gradient, value = results[name, size]
            assert (gradient - whole).norm() / whole.norm() < 1e-5
            assert value == pytest.approx(aux_loss, rel=1e-5)


def test_every_sample_counts_for_the_router_loss(mixtral: Path, tmp_path: Path) -> None:
    actor = make_actor(mixtral, tmp_path, actor={"aux_loss_coef": COEF})
    experience = ragged_experience(8)
    idle = experience.with_columns(advantages=torch.zeros_like(experience.advantages))
    assert gradients(actor, idle, 8).norm() > 0.01


def train(config: SFTConfig) -> None:
    """Run SFT without its export."""
    recipe = SFTTrainer
    inputs = prepare_inputs(recipe, config)
    strategy = DeepSpeedStrategy(config.ds, seed=1)
    strategy.setup()
    facts = DataFacts(inputs.samples.fingerprint, len(inputs.samples), seed=1)
    opened = open_checkpoints(config.ckpt, facts)
    run = prepare_run(recipe, config, inputs, strategy, opened)
    recipe.of(run).fit()


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
