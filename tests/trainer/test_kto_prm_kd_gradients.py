"""KTO, process rewards and distillation: one gradient, whatever the micro-batches, ranks and ZeRO
stage, and it is that of the formula on one unpacked sample at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from openrlhf.algorithms.distillation import Distillation
from openrlhf.algorithms.preference_loss import KTOOptions
from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.datasets.process_reward_dataset import ProcessExample
from openrlhf.datasets.sft_dataset import SFTExample
from openrlhf.datasets.unpaired_preference_dataset import UnpairedExample
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.models.actor import Actor
from openrlhf.models.distillation import Student, Teacher
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.process_reward import StepJudge
from openrlhf.trainer.base_trainer import LoopParts, LoopSettings
from openrlhf.trainer.kd_trainer import KDTrainer
from openrlhf.trainer.kto_trainer import KTOTrainer
from openrlhf.trainer.preference import Reference
from openrlhf.trainer.prm_trainer import PRMTrainer
from openrlhf.utils.tracking import NullTracker
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model
from tests.trainer.gradients import ListedSamples, response_logprob, step_gradient

ZERO_STAGES = (0, 2, 3)
MICRO_BATCH_SIZES = (21, 1)
NUM_SAMPLES = 21
MAX_LEN = 34  # of the longest mismatched pairs a part is cut
BETA, DESIRABLE, UNDESIRABLE = 0.1, 1.0, 1.5
REWARD_TOKENS = (10, 20)
COEF = 0.4
FOUR = pytest.param("four_ranks", marks=[pytest.mark.slow, pytest.mark.timeout(300)])
RANKS = ["one_rank", "two_ranks", FOUR]


def answers() -> list[SFTExample]:
    """Prompts of 1 to 12 tokens, responses of 1 to 24."""
    generator = torch.Generator().manual_seed(3)
    examples = []
    for _ in range(NUM_SAMPLES):
        prompt = int(torch.randint(1, 13, (), generator=generator))
        length = prompt + int(torch.randint(1, 25, (), generator=generator))
        token_ids = torch.randint(6, 250, (length,), generator=generator)
        examples.append(SFTExample(token_ids, torch.arange(length) >= prompt))
    return examples


def labelled_answers() -> list[UnpairedExample]:
    """The same, two in three of them wanted."""
    return [
        UnpairedExample(answer.token_ids, answer.loss_mask, is_desirable=index % 3 != 0)
        for index, answer in enumerate(answers())
    ]


def judged_texts(is_any_token: bool) -> list[ProcessExample]:
    """Markers on a third of the tokens; labels are any tokens, or tokens and shares by turns."""
    generator = torch.Generator().manual_seed(5)
    examples = []
    for index, answer in enumerate(answers()):
        marks = torch.rand(len(answer.token_ids), generator=generator) < 0.3
        marks[-1] = True
        hard = torch.randint(0, 2, (int(marks.sum()),), generator=generator)
        is_soft = not is_any_token and index % 2 == 0
        labels = torch.rand(len(hard), generator=generator) if is_soft else 10 + 10 * hard
        examples.append(ProcessExample(answer.token_ids, marks, labels, is_soft=is_soft))
    return examples


def make_kto(folder: Path, strategy: DeepSpeedStrategy, engine: Callable) -> KTOTrainer:
    reference = Actor(load_causal_lm(folder / "other"))
    return KTOTrainer(
        strategy,
        engine(Actor(load_causal_lm(folder / "model"))),
        reference=Reference(strategy.prepare_eval(reference)),
        options=KTOOptions(BETA, DESIRABLE, UNDESIRABLE),
        max_len=MAX_LEN,
        **loop(labelled_answers()),
    )


def make_prm(folder: Path, strategy: DeepSpeedStrategy, engine: Callable) -> PRMTrainer:
    judge = StepJudge(load_causal_lm(folder / "model"))
    texts = judged_texts(is_any_token=False)
    return PRMTrainer(strategy, engine(judge), reward_tokens=REWARD_TOKENS, **loop(texts))


def make_open_prm(folder: Path, strategy: DeepSpeedStrategy, engine: Callable) -> PRMTrainer:
    judge = StepJudge(load_causal_lm(folder / "model"))
    return PRMTrainer(strategy, engine(judge), **loop(judged_texts(is_any_token=True)))


def make_kd(folder: Path, strategy: DeepSpeedStrategy, engine: Callable) -> KDTrainer:
    model = load_causal_lm(folder / "model")
    teacher = Teacher(load_causal_lm(folder / "other"))
    return KDTrainer(
        strategy,
        engine(Student(model, coef=COEF, method=Distillation("forward", chunk_tokens=7))),
        teacher=strategy.prepare_eval(teacher),
        **loop(answers()),
    )


MAKERS = {"kto": make_kto, "prm": make_prm, "open_prm": make_open_prm, "kd": make_kd}


def loop(samples: Sequence) -> LoopParts:
    settings = LoopSettings(batch_size=NUM_SAMPLES, micro_batch_size=1)
    listed = ListedSamples(samples, [len(sample.token_ids) for sample in samples])
    return LoopParts(
        samples=listed,
        eval_samples=listed,
        settings=settings,
        tracker=NullTracker(),
    )


def run_everything(folder: Path) -> dict:
    results: dict = {}
    for stage in ZERO_STAGES:
        ring_attn_size = 2 if os.environ["WORLD_SIZE"] == "4" else 1
        ds = DeepSpeedConfig(zero_stage=stage, ring_attn_size=ring_attn_size)
        strategy = DeepSpeedStrategy(ds)
        strategy.setup()
        for name, make in MAKERS.items():
            optim = OptimizerConfig(adam=AdamConfig(lr=0.0))
            trainer = make(
                folder,
                strategy,
                lambda model, strategy=strategy, optim=optim: strategy.prepare_train(
                    model, optim, num_updates=8
                ),
            )
            for size in MICRO_BATCH_SIZES:
                results[name, stage, size] = step_gradient(trainer, size)
            if isinstance(trainer, KTOTrainer):
                trainer.batches_left = lambda: iter([list(range(NUM_SAMPLES))])  # as they step here
                trainer.precompute_reference()
                assert trainer.reference is None
                results[name, stage, "precomputed"] = step_gradient(trainer, 4)
            results[name, stage, "eval"] = trainer.evaluate()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gradients")
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
def four_ranks(folder: Path) -> list[dict]:
    """Two of them share each row."""
    return run_ranks(run_everything, 4, folder)


def load_plain(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def kto_by_hand(model: object, other: object) -> tuple[Tensor, dict]:
    examples = labelled_answers()
    kl = 0.0
    for index, example in enumerate(examples):
        response = examples[(index + 1) % NUM_SAMPLES].response_ids
        pair = torch.cat([example.prompt_ids, response])[:MAX_LEN]
        mask = torch.arange(len(pair)) >= example.prompt_length
        with torch.no_grad():
            kl += response_logprob(model, pair, mask) - response_logprob(other, pair, mask)
    kl = max(0.0, float(kl) / NUM_SAMPLES)
    losses, rewards = [], {True: [], False: []}
    for example in examples:
        token_ids, mask = example.token_ids, example.loss_mask
        with torch.no_grad():
            reference = response_logprob(other, token_ids, mask)
        ratio = response_logprob(model, token_ids, mask) - reference
        sign, weight = (1, DESIRABLE) if example.is_desirable else (-1, UNDESIRABLE)
        losses.append(weight * (1 - torch.sigmoid(sign * BETA * (ratio - kl))))
        rewards[example.is_desirable].append(BETA * ratio.item())
    loss = torch.stack(losses).mean()
    values = {"kto_loss": loss.item(), "loss": loss.item(), "kl": kl}
    values["chosen_reward"] = sum(rewards[True]) / len(rewards[True])
    values["reject_reward"] = sum(rewards[False]) / len(rewards[False])
    return loss, values


def prm_by_hand(model: object, other: object, *, is_any_token: bool = False) -> tuple:
    losses, hits = [], []
    for example in judged_texts(is_any_token):
        logits = model(example.token_ids[None]).logits[0][example.marker_mask]
        for own, label in zip(logits, example.labels, strict=True):
            if is_any_token:
                losses.append(-own.log_softmax(-1)[label])
                hits.append(float(own.argmax() == label))
                continue
            share = label if example.is_soft else float(label == REWARD_TOKENS[0])
            good, bad = own[list(REWARD_TOKENS)].log_softmax(-1)
            losses.append(-(share * good + (1 - share) * bad))
            hits.append(float((good > bad) == (share >= 0.5)))
    loss = torch.stack(losses).mean()
    values = {"prm_loss": loss.item(), "loss": loss.item(), "acc": sum(hits) / len(hits)}
    return loss, values


def open_prm_by_hand(model: object, other: object) -> tuple:
    return prm_by_hand(model, other, is_any_token=True)


def kd_by_hand(model: object, other: object) -> tuple[Tensor, dict]:
    nll, divergence, count = 0.0, 0.0, 0
    for example in answers():
        token_ids, mask = example.token_ids, example.loss_mask[1:]
        own = model(token_ids[None]).logits[0, :-1].log_softmax(-1)
        with torch.no_grad():
            taught = other(token_ids[None]).logits[0, :-1].log_softmax(-1)
        nll = nll - own.gather(-1, token_ids[1:, None])[:, 0][mask].sum()
        divergence = divergence + (taught.exp() * (taught - own)).sum(-1)[mask].sum()
        count += int(mask.sum())
    loss = ((1 - COEF) * nll + COEF * divergence) / count
    gpt_loss, distil_loss = (nll / count).item(), (divergence / count).item()
    return loss, {"gpt_loss": gpt_loss, "distil_loss": distil_loss, "loss": loss.item()}


BY_HAND = {"kto": kto_by_hand, "prm": prm_by_hand, "open_prm": open_prm_by_hand, "kd": kd_by_hand}


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, tuple[Tensor, dict]]:
    found = {}
    for name, formula in BY_HAND.items():
        model = load_plain(folder / "model")
        loss, values = formula(model, load_plain(folder / "other"))
        loss.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        found[name] = gradient, values
    return found


@pytest.mark.parametrize("stage", ZERO_STAGES)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("ranks", RANKS)
def test_gradient_and_metrics_are_those_of_the_formula(
    request: pytest.FixtureRequest, expected: dict, ranks: str, name: str, stage: int
) -> None:
    gradient, values = expected[name]
    for results in request.getfixturevalue(ranks):
        for case in (*MICRO_BATCH_SIZES, *(["precomputed"] if name == "kto" else [])):
            actual, metrics = results[name, stage, case]
            assert (actual - gradient).norm() / gradient.norm() < 1e-5
            assert {k: metrics[k] for k in values} == pytest.approx(values, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("ranks", RANKS)
def test_an_evaluation_has_the_metrics_of_the_formula(
    request: pytest.FixtureRequest, expected: dict, ranks: str, name: str
) -> None:
    for results in request.getfixturevalue(ranks):
        metrics = results[name, 3, "eval"]
        actual = {k: metrics[f"eval/{k}"] for k in expected[name][1]}
        assert actual == pytest.approx(expected[name][1], rel=1e-5, abs=1e-6)
