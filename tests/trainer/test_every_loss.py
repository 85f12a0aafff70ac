"""Every loss that a flag can choose, in its trainer: the gradient of a step is that of the formula
on one unpacked answer at a time, whatever the micro-batches and the number of ranks (two of four
share each row), and one held-out sample alone is evaluated as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from openrlhf.algorithms.distillation import Distillation
from openrlhf.algorithms.preference_loss import (
    PREFERENCE_LOSSES,
    PreferenceOptions,
    preference_loss,
)
from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.engines.base import SamplingSettings
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.models.actor import Actor
from openrlhf.models.distillation import Student, Teacher
from openrlhf.models.loading import load_causal_lm, load_sequence_model
from openrlhf.models.value_head import RewardLearner
from openrlhf.trainer.base_trainer import BaseTrainer, LoopParts, LoopSettings
from openrlhf.trainer.dpo_trainer import DPOTrainer
from openrlhf.trainer.kd_trainer import KDTrainer, StudentAnswers
from openrlhf.trainer.preference import Reference
from openrlhf.trainer.rm_trainer import RMTrainer
from openrlhf.utils.tracking import NullTracker
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, make_reward_model
from tests.trainer.gradients import ListedSamples, response_logprob, step_gradient
from tests.trainer.test_dpo_trainer import ragged_pair
from tests.trainer.test_kd_trainer import forward_kl, jensen_shannon
from tests.trainer.test_kto_prm_kd_gradients import answers, load_plain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_PAIRS, MICRO_BATCH_SIZES, STAGES = 9, (9, 1), {1: 0, 2: 3, 4: 2}
BETA, EPS, GAMMA, COEF = 0.3, 0.1, 0.7, 0.4
PAIR_LOSSES = [*PREFERENCE_LOSSES, "ipo per token"]
DIVERGENCES = {
    "reverse": lambda student, teacher: forward_kl(teacher, student),
    "jsd": jensen_shannon,
}
CASES = [*PAIR_LOSSES, "logexp", *DIVERGENCES, "on_policy"]


def pairs() -> ListedSamples:
    generator = torch.Generator().manual_seed(7)
    found = [ragged_pair(generator) for _ in range(NUM_PAIRS)]
    found = [replace(pair, margin=0.3 * index - 1) for index, pair in enumerate(found)]
    return ListedSamples(found, [len(p.chosen_ids) + len(p.rejected_ids) for p in found])


def texts() -> ListedSamples:
    found = answers()[:NUM_PAIRS]
    return ListedSamples(found, [len(text.token_ids) for text in found])


def loop(samples: ListedSamples) -> LoopParts:
    one = ListedSamples([samples[0]], samples.lengths[:1].tolist())
    settings = LoopSettings(batch_size=NUM_PAIRS, micro_batch_size=1)
    return LoopParts(samples=samples, eval_samples=one, settings=settings, tracker=NullTracker())


def loss_of(case: str) -> object:
    smoothing = EPS if case in ("sigmoid", "robust", "exo_pair") else 0.0
    options = PreferenceOptions(BETA, smoothing, case == "ipo per token", GAMMA)
    return preference_loss(case.split()[0], options)


def make_pair_trainer(
    case: str, folder: Path, strategy: DeepSpeedStrategy, train: Callable
) -> DPOTrainer:
    reference = Actor(load_causal_lm(folder / "other"))
    return DPOTrainer(
        strategy,
        train(Actor(load_causal_lm(folder / "model"))),
        loss=loss_of(case),  # type: ignore[arg-type]
        reference=Reference(strategy.prepare_eval(reference)),
        **loop(pairs()),
    )


def make_reward_trainer(
    case: str, folder: Path, strategy: DeepSpeedStrategy, train: Callable
) -> RMTrainer:
    model = RewardLearner(load_sequence_model(folder / "reward_model"))
    return RMTrainer(strategy, train(model), loss_kind=case, with_margin=True, **loop(pairs()))


def make_student_trainer(
    case: str, folder: Path, strategy: DeepSpeedStrategy, train: Callable
) -> KDTrainer:
    model = load_causal_lm(folder / "model")
    is_own = case == "on_policy"
    method = Distillation("reverse" if is_own else case, chunk_tokens=7)
    student = Student(model, coef=1.0 if is_own else COEF, method=method)
    teacher = strategy.prepare_eval(Teacher(load_causal_lm(folder / "other")))
    parts = {"teacher": teacher, **loop(texts())}
    engine = train(student)
    if not is_own:
        return KDTrainer(strategy, engine, **parts)
    sampling = SamplingSettings(temperature=1.0, max_new_tokens=9, stop_token_ids=(1,))
    own = StudentAnswers(texts(), OwnGenerate(model), sampling, max_len=40)
    return KDTrainer(strategy, engine, answers=own, **parts)


def make(case: str, folder: Path, strategy: DeepSpeedStrategy, train: Callable) -> BaseTrainer:
    if case in PAIR_LOSSES:
        return make_pair_trainer(case, folder, strategy, train)
    if case == "logexp":
        return make_reward_trainer(case, folder, strategy, train)
    return make_student_trainer(case, folder, strategy, train)


def run_everything(folder: Path) -> dict:
    results: dict = {}
    optim = OptimizerConfig(adam=AdamConfig(lr=0.0))
    size = DeepSpeedStrategy(DeepSpeedConfig()).topology.world_size
    for case in CASES:
        stage = min(STAGES[size], 2 if case == "on_policy" else 3)
        ring_attn_size = 2 if size == 4 else 1
        ds = DeepSpeedConfig(zero_stage=stage, ring_attn_size=ring_attn_size)
        strategy = DeepSpeedStrategy(ds)
        strategy.setup()
        trainer = make(
            case,
            folder,
            strategy,
            lambda model, strategy=strategy: strategy.prepare_train(model, optim, num_updates=8),
        )
        for micro_batch_size in MICRO_BATCH_SIZES:
            results[case, micro_batch_size] = step_gradient(trainer, micro_batch_size)
        if case == "on_policy":
            results["answers"] = [trainer.samples[row] for row in range(NUM_PAIRS)]
        results[case, "eval"] = trainer.evaluate()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    make_model(folder / "model", initializer_range=0.1)
    make_model(folder / "other", initializer_range=0.1, seed=1)
    make_reward_model(folder / "reward_model", initializer_range=0.1)
    return folder


@pytest.fixture(scope="module")
def worlds(folder: Path) -> dict[int, list[dict]]:
    return {size: run_ranks(run_everything, size, folder) for size in (1, 2, 4)}


def log_sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x).log()


def log_odds(mean: Tensor) -> Tensor:
    return torch.log(mean.exp() / (1 - mean.exp()))


# From log-probs of the chosen and the rejected answer (c, r), their lengths (m, n), and beta times
# their ratios to the reference (C, R).
FORMULAS = {
    "sigmoid": lambda c, r, m, n, C, R: -(1 - EPS) * log_sigmoid(C - R) - EPS * log_sigmoid(R - C),
    "ipo": lambda c, r, m, n, C, R: ((C - R) / BETA - 1 / (2 * BETA)) ** 2,
    "ipo per token": lambda c, r, m, n, C, R: ((C / m - R / n) / BETA - 1 / (2 * BETA)) ** 2,
    "hinge": lambda c, r, m, n, C, R: (1 - (C - R)).clamp(min=0),
    "robust": lambda c, r, m, n, C, R: (
        (-(1 - EPS) * log_sigmoid(C - R) + EPS * log_sigmoid(R - C)) / (1 - 2 * EPS)
    ),
    "exo_pair": lambda c, r, m, n, C, R: (
        torch.sigmoid(C - R) * (log_sigmoid(C - R) - torch.log(torch.tensor(1 - EPS)))
        + torch.sigmoid(R - C) * (log_sigmoid(R - C) - torch.log(torch.tensor(EPS)))
    ),
    "apo_zero": lambda c, r, m, n, C, R: 1 - torch.sigmoid(C) + torch.sigmoid(R),
    "apo_down": lambda c, r, m, n, C, R: torch.sigmoid(C) + 1 - torch.sigmoid(C - R),
    "simpo": lambda c, r, m, n, C, R: -log_sigmoid(BETA * (c / m - r / n) - GAMMA),
    "cpo": lambda c, r, m, n, C, R: -log_sigmoid(BETA * (c - r)) - c / m,
    "orpo": lambda c, r, m, n, C, R: -c / m - BETA * log_sigmoid(log_odds(c / m) - log_odds(r / n)),
}


def pair_loss(folder: Path, case: str, model: object) -> Tensor:
    """Mean over the pairs, from whole logits of one answer at a time."""
    other, losses = load_plain(folder / "other"), []
    for index in range(NUM_PAIRS):
        pair = pairs()[index]
        sides = (pair.chosen_ids, pair.chosen_mask), (pair.rejected_ids, pair.rejected_mask)
        own = [response_logprob(model, *side) for side in sides]
        with torch.no_grad():
            fixed = [response_logprob(other, *side) for side in sides]
        ratios = [BETA * (a - b) for a, b in zip(own, fixed, strict=True)]
        sizes = [int(mask.sum()) for _, mask in sides]
        losses.append(FORMULAS[case](*own, *sizes, *ratios))
    return torch.stack(losses).mean()


def reward_loss(model: object) -> Tensor:
    """Mean of log(1 + exp(margin - difference))."""
    losses = []
    for index in range(NUM_PAIRS):
        pair = pairs()[index]
        chosen, rejected = (
            model(ids[None]).logits[0, 0]  # type: ignore[operator]
            for ids in (pair.chosen_ids, pair.rejected_ids)
        )
        losses.append(torch.log(1 + torch.exp(pair.margin - chosen + rejected)))
    return torch.stack(losses).mean()


def distillation_loss(folder: Path, case: str, model: object, samples: list) -> Tensor:
    """(1 - k) cross-entropy + k divergence, mean over answer tokens."""
    other, nll, divergence, count = load_plain(folder / "other"), 0.0, 0.0, 0
    coef = 1.0 if case == "on_policy" else COEF
    distance = DIVERGENCES["reverse" if case == "on_policy" else case]
    for sample in samples:
        ids, mask = sample.token_ids, sample.loss_mask[1:]
        own = model(ids[None]).logits[0, :-1].log_softmax(-1)  # type: ignore[operator]
        with torch.no_grad():
            taught = other(ids[None]).logits[0, :-1].log_softmax(-1)
        nll = nll - own.gather(-1, ids[1:, None])[:, 0][mask].sum()
        divergence = divergence + distance(own, taught)[mask].sum()
        count += int(mask.sum())
    return ((1 - coef) * nll + coef * divergence) / count


def expected(folder: Path, case: str, results: dict) -> tuple[Tensor, float]:
    """Gradient and loss in plain torch and float64."""
    if case == "logexp":
        auto_class = transformers.AutoModelForSequenceClassification
        model = auto_class.from_pretrained(folder / "reward_model", dtype=torch.float64)
        loss = reward_loss(model)
    else:
        model = load_plain(folder / "model")
        if case in PAIR_LOSSES:
            loss = pair_loss(folder, case, model)
        else:
            own = results["answers"] if case == "on_policy" else answers()[:NUM_PAIRS]
            loss = distillation_loss(folder, case, model, own)
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), loss.item()


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_a_step_is_that_of_the_formula(
    folder: Path, worlds: dict, case: str
) -> None:
    gradient, loss = expected(folder, case, worlds[1][0])
    assert gradient.norm() > 0
    for results in (*worlds[1], *worlds[2], *worlds[4]):
        for size in MICRO_BATCH_SIZES:
            actual, metrics = results[case, size]
            assert (actual - gradient).norm() / gradient.norm() < 1e-5, size
            assert metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)


def test_students_answer_alike_on_any_number_of_ranks(worlds: dict) -> None:
    alone = worlds[1][0]["answers"]
    assert {len(text.token_ids) for text in alone} != set(texts().lengths.tolist())
    for results in (*worlds[2], *worlds[4]):
        for own, other in zip(results["answers"], alone, strict=True):
            assert torch.equal(own.token_ids, other.token_ids)


@pytest.mark.parametrize("case", CASES)
def test_several_ranks_evaluate_one_sample_as_one_rank_does(worlds: dict, case: str) -> None:
    alone = worlds[1][0][case, "eval"]
    assert alone and all(torch.isfinite(torch.tensor(value)) for value in alone.values())
    for results in (*worlds[2], *worlds[4]):
        assert results[case, "eval"] == pytest.approx(alone, rel=1e-5, abs=1e-5)
