"""One optimizer step of every supervised command: its gradient and metrics are those of the formula
on one unpacked answer at a time, however micro-batches, ranks and ZeRO stages cut it, the router
loss included. From the words of a command line to numbers in plain torch.

A world of ranks starts once and runs all its cases; `-k "dpo-kept and two"` compares one of them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from openrlhf.commands.train_supervised import prepare_inputs
from openrlhf.config.cli import parse_config
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.errors import CheckpointError
from openrlhf.trainer.base_trainer import BaseTrainer
from openrlhf.trainer.rm_trainer import RMTrainer
from tests.distributed.spawn import run_ranks
from tests.helpers.gradients import response_logprob, step_gradient
from tests.helpers.losses import BETA, COMMANDS, make_row
from tests.tiny import make_model, make_reward_model, write_jsonl

NUM_ROWS = 9
MICRO_BATCH_SIZES = (9, 2)
GAMMA, COEF, NLL_COEF = 0.7, 0.4, 0.5
MAX_LEN = 40  # a part of the longest mismatched pairs is cut
STAGES = {1: 0, 2: 3, 4: 2}  # by the number of ranks; two of four share each row
COMMON = (
    f"--train_batch_size {NUM_ROWS} --micro_train_batch_size 1 --max_epochs 1 --max_len {MAX_LEN} "
    "--eval_split train --learning_rate 1e-20 --lr_warmup_ratio 0 --max_norm 1e9"
)
NLL = f"--nll_loss_coef {NLL_COEF}"
KTO = "--desirable_loss_weight 1.0 --undesirable_loss_weight 1.5"
MAIN = {
    "sft": "sft",
    "dpo": f"dpo {NLL}",
    "dpo kept": f"dpo {NLL} --precompute_ref_log_probs",
    "rm": "rm --margin_loss",
    "kto": f"kto {KTO}",
    "kto kept": f"kto {KTO} --precompute_ref_log_probs",
    "prm": "prm --reward_tokens + -",
    "open prm": "prm",
    "kd": f"kd --kd_coef {COEF}",
    "own answers": "kd --kd_coef 1 --kd_divergence reverse --kd_on_policy --kd_max_new_tokens 9",
}
ROUTER = {
    "sft router": "sft",
    "dpo router": f"dpo --loss_type simpo --simpo_gamma {GAMMA}",
    "rm router": "rm",
    "kto router": f"kto {KTO}",
    "prm router": "prm",
    "kd router": f"kd --kd_coef {COEF}",
}
CASES = MAIN | ROUTER
RUN_BY_TWO = (*MAIN, "sft router", "rm router")


def make_folder(folder: Path, **heads: int) -> Path:
    """Models of every kind, with others beside them, and rows."""
    kinds = {"": ("qwen2", 64), "moe-": ("mixtral", 32)}
    for kind, (family, size) in kinds.items():
        sizes = {"hidden_size": size, "initializer_range": 0.2 if kind else 0.1, **heads}
        for seed, name in enumerate(("model", "other")):
            make_model(folder / f"{kind}{name}", family, seed=seed, **sizes)  # type: ignore[arg-type]
        make_reward_model(folder / f"{kind}reward", architecture=family, **sizes)
    write_jsonl(folder / "rows.jsonl", [make_row(n) for n in range(NUM_ROWS)])
    return folder


def models_of(folder: Path, case: str) -> tuple[Path, Path]:
    """The model that a case trains, and the one beside it."""
    kind = "moe-" if case in ROUTER else ""
    trained, beside = {"rm": ("reward", "other"), "kto": ("other", "model")}.get(
        CASES[case].split()[0], ("model", "other")
    )
    return folder / f"{kind}{trained}", folder / f"{kind}{beside}"


def start(folder: Path, case: str, flags: str = "") -> BaseTrainer:
    """The trainer of a case's command line."""
    command, _, own = CASES[case].partition(" ")
    config_class, recipe, needed = COMMANDS[command]
    model, other = models_of(folder, case)
    line = f"--pretrain {model} --dataset {folder}/rows.jsonl --eval_dataset {folder}/rows.jsonl "
    line += f"--save_path {folder}/run --ckpt_path {folder}/ckpt {COMMON} {own} "
    line += needed.format(other=other) + " " + flags
    if "simpo" in own:  # which has no reference
        line = line.replace(f"--ref_pretrain {other}", "")
    line += f" --aux_loss_coef {COEF}" if case in ROUTER else ""
    config = parse_config(config_class, line.split()).config
    inputs = prepare_inputs(recipe, config)
    strategy = DeepSpeedStrategy(config.ds)
    strategy.setup()
    trainer = recipe(config, inputs, strategy)
    if command == "kto":  # whose reference is the model that it starts from
        trainer.reference = trainer.load_reference(str(other))
    if "--precompute_ref_log_probs" in own:
        trainer.precompute_reference()
        assert (trainer.reference is None) == (command == "dpo")
    return trainer


def run_case(folder: Path, case: str, world_size: int) -> dict:
    """Gradients and metrics of a step by micro-batch size, an evaluation, and the samples."""
    stage = min(STAGES[world_size], 2 if case == "own answers" else 3)
    shared = "--ring_attn_size 2" if world_size == 4 else ""
    trainer = start(folder, case, f"--zero_stage {stage} {shared}")
    [rows] = trainer.batches_left()
    found: dict = {size: step_gradient(trainer, size, rows) for size in MICRO_BATCH_SIZES}
    found["samples"] = [trainer.samples[row] for row in rows]
    found["eval"] = trainer.evaluate()
    if case == "kto":  # a rank of two has no pair for its second micro-batch
        trainer.micro_batch_size = 1
        found["odd batch"] = trainer.prepare(rows[:3], trainer.samples)
    if isinstance(trainer, RMTrainer):
        found["scale"] = trainer.reward_mean_and_std(trainer.samples)
    return found


def export_and_spoil(folder: Path) -> str:
    """The error of the check of an export whose head is changed afterwards; "" on other ranks."""
    trainer = start(folder, "rm", "--zero_stage 3 --lora_rank 4")
    path = folder / "export"
    trainer.export(path)
    batch = trainer.collate([trainer.samples[0], trainer.samples[1]])
    with torch.no_grad():
        expected = trainer.engine(batch.packed).scores
    if not trainer.strategy.is_main:
        return ""
    trainer.check_export(path, batch, expected)
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    [head] = [key for key in tensors if key.endswith("score.weight")]
    save_file({**tensors, head: tensors[head] * 1.01}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        trainer.check_export(path, batch, expected)
    return str(caught.value)


def run_cases(folder: Path) -> dict[str, Any]:
    size = int(os.environ["WORLD_SIZE"])
    cases = RUN_BY_TWO if size == 2 else CASES
    found: dict[str, Any] = {case: run_case(folder, case, size) for case in cases}
    if size == 2:
        found["spoilt export"] = export_and_spoil(folder)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("gradients"))


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> list[dict]:
    return run_ranks(run_cases, 1, folder)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict]:
    return run_ranks(run_cases, 2, folder)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def four_ranks(folder: Path) -> list[dict]:
    return run_ranks(run_cases, 4, folder)  # type: ignore[return-value]


def token_logprobs(model: Any, ids: Tensor) -> Tensor:
    return model(ids[None]).logits[0, :-1].log_softmax(-1)


def sft_by_hand(own: Any, other: Any, samples: list) -> tuple[Tensor, dict]:
    total = sum(response_logprob(own, s.token_ids, s.loss_mask) for s in samples)
    loss = -total / sum(int(s.loss_mask.sum()) for s in samples)
    return loss, {"gpt_loss": loss.item()}


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return (teacher.exp() * (teacher - student)).sum(-1)


def kd_by_hand(own: Any, other: Any, samples: list, *, is_own: bool) -> tuple[Tensor, dict]:
    coef = 1.0 if is_own else COEF
    far, nll, count = torch.zeros(()), torch.zeros(()), 0
    for sample in samples:
        ids, mask = sample.token_ids, sample.loss_mask[1:]
        said, taught = token_logprobs(own, ids), token_logprobs(other, ids).detach()
        nll = nll - said.gather(-1, ids[1:, None])[:, 0][mask].sum()
        far = far + (forward_kl(taught, said) if is_own else forward_kl(said, taught))[mask].sum()
        count += int(mask.sum())
    loss = ((1 - coef) * nll + coef * far) / count
    values = {"gpt_loss": (nll / count).item(), "distil_loss": (far / count).item()}
    return loss, values if coef < 1 else {}


def rm_by_hand(own: Any, other: Any, samples: list, *, margin: bool) -> tuple[Tensor, dict]:
    chosen, rejected = (
        torch.cat([own(ids[None]).logits[0] for ids in side])
        for side in ([s.chosen_ids for s in samples], [s.rejected_ids for s in samples])
    )
    margins = torch.tensor([s.margin if margin else 0.0 for s in samples])
    loss = torch.log(1 + torch.exp(-(chosen - rejected - margins))).mean()
    return loss, {
        "loss": loss.item(),
        "acc": (chosen > rejected).float().mean().item(),
        "chosen_reward": chosen.mean().item(),
        "reject_reward": rejected.mean().item(),
    }


def prm_by_hand(own: Any, other: Any, samples: list, *, is_open: bool) -> tuple[Tensor, dict]:
    losses, hits = [], []
    for sample in samples:
        logits = own(sample.token_ids[None]).logits[0][sample.marker_mask]
        for row, label in zip(logits, sample.labels.tolist(), strict=True):
            allowed = list(range(len(row))) if is_open else [16, 18]  # + and -
            losses.append(-row[allowed].log_softmax(-1)[allowed.index(label)])
            hits.append(float(allowed[int(row[allowed].argmax())] == label))
    loss = torch.stack(losses).mean()
    return loss, {"prm_loss": loss.item(), "acc": sum(hits) / len(hits)}


def kto_by_hand(own: Any, other: Any, samples: list) -> tuple[Tensor, dict]:
    kl = 0.0
    for sample, after in zip(samples, [*samples[1:], samples[0]], strict=True):
        prompt = sample.token_ids[: sample.prompt_length]
        pair = torch.cat([prompt, after.token_ids[after.prompt_length :]])[:MAX_LEN]
        mask = torch.arange(len(pair)) >= sample.prompt_length
        with torch.no_grad():
            kl += float(response_logprob(own, pair, mask) - response_logprob(other, pair, mask))
    kl = max(0.0, kl / len(samples))
    losses, rewards = [], {True: [], False: []}
    for sample in samples:
        with torch.no_grad():
            reference = response_logprob(other, sample.token_ids, sample.loss_mask)
        ratio = response_logprob(own, sample.token_ids, sample.loss_mask) - reference
        sign, weight = (1, 1.0) if sample.is_desirable else (-1, 1.5)
        losses.append(weight * (1 - torch.sigmoid(sign * BETA * (ratio - kl))))
        rewards[bool(sample.is_desirable)].append(BETA * ratio.item())
    loss = torch.stack(losses).mean()
    chosen, rejected = (sum(rewards[good]) / len(rewards[good]) for good in (True, False))
    return loss, {
        "kto_loss": loss.item(),
        "kl": kl,
        "chosen_reward": chosen,
        "reject_reward": rejected,
    }


def log_sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x).log()


def dpo_by_hand(own: Any, other: Any, samples: list, case: str) -> tuple[Tensor, dict]:
    losses, rewards, nll, num_tokens = [], [], torch.zeros(()), 0
    for sample in samples:
        sides = [
            (sample.chosen_ids, sample.chosen_mask),
            (sample.rejected_ids, sample.rejected_mask),
        ]
        said = [response_logprob(own, *side) for side in sides]
        with torch.no_grad():
            fixed = [response_logprob(other, *side) for side in sides]
        ratios = [BETA * (a - b) for a, b in zip(said, fixed, strict=True)]
        sizes = [int(mask.sum()) for _, mask in sides]
        means = [a / n for a, n in zip(said, sizes, strict=True)]
        simpo = BETA * (means[0] - means[1]) - GAMMA
        losses.append(-log_sigmoid(simpo if case == "dpo router" else ratios[0] - ratios[1]))
        rewards.append([ratio.item() for ratio in ratios])
        nll, num_tokens = nll - said[0], num_tokens + sizes[0]
    loss, nll = torch.stack(losses).mean(), nll / num_tokens
    if case == "dpo router":
        return loss, {"loss": loss.item()}
    chosen, rejected = torch.tensor(rewards).T
    return loss + NLL_COEF * nll, {
        "loss": loss.item(),
        "nll_loss": nll.item(),
        "acc": (chosen > rejected).float().mean().item(),
        "chosen_reward": chosen.mean().item(),
        "reject_reward": rejected.mean().item(),
    }


def router_by_hand(own: Any, samples: list) -> Tensor:
    """The router loss of each sequence alone, which counts as often as what it teaches: a learnt
    token, a step marker, an answer, half a pair.
    """
    sequences = []
    for sample in samples:
        if hasattr(sample, "chosen_ids"):
            sequences += [(sample.chosen_ids, 0.5), (sample.rejected_ids, 0.5)]
        elif hasattr(sample, "is_desirable"):
            sequences += [(sample.token_ids, 1.0)]
        else:
            mask = sample.loss_mask if hasattr(sample, "loss_mask") else sample.marker_mask
            sequences += [(sample.token_ids, float(mask.sum()))]
    total = torch.zeros(())
    for ids, weight in sequences:
        logits = own.base_model(ids[None], output_router_logits=True).router_logits
        total = total + weight * load_balancing_loss_func(logits, 4, 2)
    return total / sum(weight for _, weight in sequences)


def by_hand(case: str, own: Any, other: Any, samples: list) -> tuple[Tensor, dict]:
    command = CASES[case].split()[0]
    if command == "kd":
        return kd_by_hand(own, other, samples, is_own=case == "own answers")
    if command == "rm":
        return rm_by_hand(own, other, samples, margin=case != "rm router")
    if command == "prm":
        return prm_by_hand(own, other, samples, is_open=case != "prm")
    if command == "dpo":
        return dpo_by_hand(own, other, samples, case)
    return {"sft": sft_by_hand, "kto": kto_by_hand}[command](own, other, samples)


def load(path: Path) -> Any:
    """In float64, experts in float32."""
    kind = "SequenceClassification" if path.name.endswith("reward") else "CausalLM"
    dtype = torch.float32 if "moe" in path.name else torch.float64
    return getattr(transformers, f"AutoModelFor{kind}").from_pretrained(path, dtype=dtype)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str, list], tuple[Tensor, dict]]:
    """Gives gradient and metrics of a case on its samples."""
    known: dict[str, tuple[Tensor, dict]] = {}

    def of(case: str, samples: list) -> tuple[Tensor, dict]:
        if case not in known:
            known[case] = gradient_by_hand(folder, case, samples)
        return known[case]

    return of


def gradient_by_hand(folder: Path, case: str, samples: list) -> tuple[Tensor, dict]:
    own, other = map(load, models_of(folder, case))
    loss, values = by_hand(case, own, other, samples)
    assert case != "kto" or values["kl"] > 0.1  # the reference point has a say
    if case in ROUTER:
        router_loss = router_by_hand(own, samples)
        assert router_loss > 2.1  # two experts a token, used unevenly
        loss, values = loss + COEF * router_loss, {"aux_loss": router_loss.item()}
    loss.backward()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in own.parameters()]
    return torch.cat([part.flatten() for part in parts]), values


SLOW = [pytest.mark.slow, pytest.mark.timeout(300)]
RUNS = [
    pytest.param(world, case, marks=marks, id=f"{world}-{case.replace(' ', '-')}")
    for world, cases, marks in (
        ("two_ranks", RUN_BY_TWO, []),
        ("one_rank", CASES, SLOW),
        ("four_ranks", CASES, SLOW),
    )
    for case in cases
]
EVALUATED = [run for run in RUNS if run.values[1] in MAIN.keys() - {"own answers"}]


@pytest.mark.parametrize(("ranks", "case"), RUNS)
def test_gradients_and_metrics_are_those_of_the_formulas(
    request: pytest.FixtureRequest, expected: Callable, ranks: str, case: str
) -> None:
    for results in request.getfixturevalue(ranks):
        gradient, values = expected(case, results[case]["samples"])
        for size in MICRO_BATCH_SIZES:
            actual, metrics = results[case][size]
            error = (actual - gradient).norm() / gradient.norm()
            assert error < (1e-4 if case in ROUTER else 1e-5), size
            own = {name: metrics[name] for name in values}
            assert own == pytest.approx(values, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("ranks", "case"), EVALUATED)
def test_an_evaluation_has_the_metrics_of_the_formulas(
    request: pytest.FixtureRequest, expected: Callable, ranks: str, case: str
) -> None:
    for results in request.getfixturevalue(ranks):
        found = results[case]["eval"]
        _, values = expected(case, results[case]["samples"])
        names = values.keys() - ({"kto_loss", "kl"} if "kto" in case else {})  # another order
        own = {name: found[f"eval/{name}"] for name in names}
        assert own == pytest.approx({name: values[name] for name in names}, rel=1e-4)


@pytest.mark.slow
def test_the_reference_point_of_three_pairs_is_that_of_any_number_of_ranks(
    one_rank: list[dict], two_ranks: list[dict]
) -> None:
    for results in two_ranks:
        assert results["kto"]["odd batch"] == pytest.approx(one_rank[0]["kto"]["odd batch"])


@pytest.mark.slow
def test_students_answer_alike_on_any_number_of_ranks(
    one_rank: list[dict], two_ranks: list[dict]
) -> None:
    alone = one_rank[0]["own answers"]["samples"]
    assert any(
        len(a.token_ids) != len(b.token_ids)
        for a, b in zip(alone, one_rank[0]["sft"]["samples"], strict=True)
    )
    for results in two_ranks:
        for own, other in zip(results["own answers"]["samples"], alone, strict=True):
            assert torch.equal(own.token_ids, other.token_ids)


def test_the_scale_of_rewards_covers_the_pairs_of_all_ranks(
    folder: Path, two_ranks: list[dict]
) -> None:
    samples, model = two_ranks[0]["rm"]["samples"], load(folder / "reward")
    texts = [ids for s in samples for ids in (s.chosen_ids, s.rejected_ids)]
    with torch.no_grad():
        scores = torch.cat([model(ids[None]).logits[0] for ids in texts])
    scale = (scores.mean().item(), scores.std(correction=0).item())
    for results in two_ranks:
        assert results["rm"]["scale"] == pytest.approx(scale, rel=1e-5)


def test_an_export_whose_head_is_another_is_refused(two_ranks: list[dict]) -> None:
    said, other = (results["spoilt export"] for results in two_ranks)
    assert "gives other scores than the one that was trained" in said and other == ""
