"""train_rm and train_dpo, run as commands: what they learn holds on pairs they never saw, and what
they leave loads in Hugging Face classes and scores as the trainer did.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import Tensor

from openrlhf.cli.train_dpo import main as train_dpo
from openrlhf.cli.train_rm import main as train_rm
from openrlhf.models.value_head import RewardScale
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, write_jsonl

LETTERS, VOWELS = "abcdefghijkl", "aei"
NUM_PAIRS, NUM_HELD_OUT, QUESTION_SIZE = 640, 64, 3
SIDES = ("chosen", "rejected")
REFERENCE_FREE = {  # reward of a log-prob per token, with beta 2
    "simpo": lambda logprob: 2.0 * logprob,
    "orpo": lambda logprob: 2.0 * torch.log(logprob.exp() / (1 - logprob.exp())),
}
COMMON = "--prompt_key question --lr_warmup_ratio 0 --micro_train_batch_size 32 --eval_split train"
RM = "--train_batch_size 64 --max_epochs 4 --eval_steps 10 --learning_rate 4e-3"
DPO = "--train_batch_size 64 --eval_steps 5 --learning_rate 2e-3"
RM_RUNS = {"rm": "", "rm_lora": "--lora_rank 8 --lora_alpha 16"}
DPO_RUNS = {
    "sigmoid": "--beta 0.1",
    "precomputed": "--beta 0.1 --precompute_ref_log_probs",
    "dpo_lora": "--beta 0.1 --lora_rank 8 --learning_rate 1e-2",
    "ipo": "--beta 0.1 --ipo",
    "simpo": "--beta 2 --loss_type simpo",
    "orpo": "--beta 2 --loss_type orpo",
}
RISES = {"sigmoid": 0.3, "dpo_lora": 0.15, "ipo": 0.2, "simpo": 1.0, "orpo": 0.1}


def num_vowels(text: str) -> int:
    return sum(letter in VOWELS for letter in text)


def make_pair(rng: random.Random) -> dict[str, str]:
    """A question and two answers of letters; the better one has more vowels."""
    while True:
        answers = ["".join(rng.choices(LETTERS, k=rng.randint(4, 8))) for _ in range(2)]
        worse, better = sorted(answers, key=num_vowels)
        if num_vowels(worse) < num_vowels(better):
            question = "".join(rng.choices(LETTERS, k=QUESTION_SIZE))
            return {"question": question, "chosen": better, "rejected": worse}


def run_commands(folder: Path) -> None:
    paths = f"--pretrain {folder}/model --dataset {folder}/train.jsonl "
    paths += f"--eval_dataset {folder}/eval.jsonl {COMMON}"
    for command, common, runs in ((train_rm, RM, RM_RUNS), (train_dpo, DPO, DPO_RUNS)):
        for name, flags in runs.items():
            command(f"{paths} --save_path {folder}/{name} {common} {flags}".split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    make_model(folder / "model")
    rng = random.Random(0)
    write_jsonl(folder / "train.jsonl", [make_pair(rng) for _ in range(NUM_PAIRS)])
    write_jsonl(folder / "eval.jsonl", [make_pair(rng) for _ in range(NUM_HELD_OUT)])
    run_ranks(run_commands, 1, folder)
    return folder


def read_metrics(folder: Path, name: str) -> list[dict]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def values_of(folder: Path, name: str, metric: str) -> list[float]:
    return [record[metric] for record in read_metrics(folder, name) if metric in record]


def held_out(folder: Path, side: str) -> list[Tensor]:
    """Token ids of one side of every held-out pair, as training reads them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    texts = [row["question"] + row[side] + tokenizer.eos_token for row in rows]
    return [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]


def mean_logprobs(folder: Path, name: str, side: str) -> Tensor:
    """Log-prob per token of one side's answers, (held-out pairs,), as the model is loaded."""
    auto_class = transformers.AutoModelForCausalLM
    model, info = auto_class.from_pretrained(folder / name, output_loading_info=True)
    assert not any(info.values())
    means = []
    for ids in held_out(folder, side):
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        means.append(logprobs.gather(-1, ids[0, 1:, None])[QUESTION_SIZE - 1 :].mean())
    return torch.stack(means)


def load_reward_model(folder: Path, name: str) -> torch.nn.Module:
    auto_class = transformers.AutoModelForSequenceClassification
    if name == "rm":
        return auto_class.from_pretrained(folder / name, num_labels=1)
    base = auto_class.from_pretrained(folder / "model", num_labels=1)
    return peft.PeftModel.from_pretrained(base, folder / name)


@pytest.mark.parametrize("name", RM_RUNS)
def test_a_reward_model_ranks_pairs_it_never_saw(folder: Path, name: str) -> None:
    losses = values_of(folder, name, "loss")
    assert len(losses) == 4 * 10
    assert losses[0] == pytest.approx(math.log(2), abs=0.05)  # before the first update
    assert values_of(folder, name, "eval/acc")[-1] >= 0.9


@pytest.mark.parametrize("name", RM_RUNS)
def test_an_exported_reward_model_scores_as_the_trainer_did(folder: Path, name: str) -> None:
    model = load_reward_model(folder, name).eval()
    with torch.no_grad():
        chosen, rejected = (
            torch.cat([model(ids).logits[0] for ids in held_out(folder, side)]) for side in SIDES
        )
    last = [record for record in read_metrics(folder, name) if "eval/acc" in record][-1]
    assert chosen.mean().item() == pytest.approx(last["eval/chosen_reward"], abs=1e-4)
    assert rejected.mean().item() == pytest.approx(last["eval/reject_reward"], abs=1e-4)
    scale = RewardScale.of(transformers.AutoConfig.from_pretrained(folder / name))
    scores = torch.cat([chosen, rejected])
    assert scale.mean == pytest.approx(scores.mean().item(), abs=1e-4)
    assert scale.std == pytest.approx(scores.std(correction=0).item(), rel=1e-4)


@pytest.mark.parametrize("name", RISES)
def test_the_reward_margin_rises_on_pairs_it_never_saw(folder: Path, name: str) -> None:
    margins = values_of(folder, name, "eval/reward_margin")
    assert len(margins) == 2
    first = 0.0  # rewards are measured against the model it starts from
    if name in REFERENCE_FREE:
        chosen, rejected = (
            REFERENCE_FREE[name](mean_logprobs(folder, "model", side)) for side in SIDES
        )
        first = (chosen - rejected).mean().item()
    assert abs(first) < 0.1
    assert margins[-1] - first > RISES[name]


@pytest.mark.parametrize("name", ["sigmoid", "dpo_lora"])
def test_policy_and_reference_are_one_before_the_first_update(folder: Path, name: str) -> None:
    first = read_metrics(folder, name)[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert first["chosen_reward"] == first["reject_reward"] == 0.0


def test_reference_log_probs_computed_before_training_change_nothing(folder: Path) -> None:
    asked, kept = (read_metrics(folder, name) for name in ("sigmoid", "precomputed"))
    for a, b in zip(asked, kept, strict=True):
        names = [name for name in a if "timing" not in name and "tokens_per_s" not in name]
        assert {name: b[name] for name in names} == pytest.approx(
            {name: a[name] for name in names}, rel=1e-5, abs=1e-5
        )


@pytest.mark.parametrize("name", REFERENCE_FREE)
def test_an_exported_policy_gives_the_rewards_that_were_logged(folder: Path, name: str) -> None:
    for side, metric in zip(SIDES, ("chosen_reward", "reject_reward"), strict=True):
        logged = values_of(folder, name, f"eval/{metric}")[-1]
        rewards = REFERENCE_FREE[name](mean_logprobs(folder, name, side))
        assert rewards.mean().item() == pytest.approx(logged, rel=1e-4)


def test_the_rewards_logged_for_dpo_are_those_of_the_export(folder: Path) -> None:
    for side, metric in (("chosen", "eval/chosen_reward"), ("rejected", "eval/reject_reward")):
        num_tokens = torch.tensor([ids.size(1) - QUESTION_SIZE for ids in held_out(folder, side)])
        trained, first = (mean_logprobs(folder, name, side) for name in ("sigmoid", "model"))
        expected = (0.1 * (trained - first) * num_tokens).mean().item()
        assert values_of(folder, "sigmoid", metric)[-1] == pytest.approx(expected, abs=1e-5)
