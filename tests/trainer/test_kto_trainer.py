"""KTO: which pairs give the reference point, and a run of the command that learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from openrlhf.cli.train_kto import main
from openrlhf.datasets.unpaired_preference_dataset import UnpairedExample
from openrlhf.trainer.kto_trainer import mismatched_pairs
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, write_jsonl
from tests.trainer.gradients import response_logprob

FLAGS = (
    "--input_key question --output_key answer --train_batch_size 16 --micro_train_batch_size 4 "
    "--learning_rate 2e-3 --beta 0.1 --max_epochs 4 --eval_split train --lr_warmup_ratio 0"
)


def example(prompt: list[int], response: list[int], is_desirable: bool = True) -> UnpairedExample:
    token_ids = torch.tensor(prompt + response)
    return UnpairedExample(token_ids, torch.arange(len(token_ids)) >= len(prompt), is_desirable)


def test_a_mismatched_pair_is_a_prompt_with_the_response_of_the_next_row() -> None:
    rows = [example([1, 2], [3]), example([4], [5, 6]), example([7, 8], [9, 10])]
    pairs = mismatched_pairs(rows)
    assert [pair.token_ids.tolist() for pair in pairs] == [[1, 2, 5, 6], [4, 9, 10], [7, 8, 3]]
    assert [pair.loss_mask.int().tolist() for pair in pairs] == [[0, 0, 1, 1], [0, 1, 1], [0, 0, 1]]


def test_a_mismatched_pair_is_cut_at_the_longest_row() -> None:
    pairs = mismatched_pairs([example([1, 2, 3], [4]), example([5], [6, 7, 8])])
    assert [pair.token_ids.tolist() for pair in pairs] == [[1, 2, 3, 6], [5, 4]]


def test_a_row_alone_has_no_mismatched_pair() -> None:
    assert mismatched_pairs([example([1], [2])]) == []


def make_rows(numbers: range) -> list[dict]:
    """Answers in words are wanted, answers in digits are not."""
    return [
        {
            "question": f"{n}?",
            "answer": f"yes {n % 7}" if n % 2 else f"99{n % 7}",
            "label": n % 2,
        }
        for n in numbers
    ]


def train(folder: Path) -> None:
    main(
        f"--pretrain {folder}/model --dataset {folder}/train.jsonl "
        f"--eval_dataset {folder}/eval.jsonl --save_path {folder}/run {FLAGS}".split()
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kto")
    make_model(folder / "model")
    write_jsonl(folder / "train.jsonl", make_rows(range(96)))
    write_jsonl(folder / "eval.jsonl", make_rows(range(100, 133)))
    run_ranks(train, 1, folder)
    return folder


def read_metrics(folder: Path) -> list[dict]:
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def test_the_reward_margin_rises_on_rows_it_never_saw(folder: Path) -> None:
    records = read_metrics(folder)
    steps = [record for record in records if "kto_loss" in record]
    assert steps[0]["kto_loss"] == pytest.approx(0.5, abs=1e-6)  # policy and reference are one
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-4)
    margins = [record["eval/reward_margin"] for record in records if "eval/kto_loss" in record]
    assert len(margins) == 4
    assert margins[-1] > 1.5
    assert records[-1]["eval/chosen_reward"] > 0 > records[-1]["eval/reject_reward"]


def test_the_logged_rewards_are_those_of_the_export(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "run")
    trained, first = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name)
        for name in ("run", "model")
    )
    rewards: dict[int, list[float]] = {0: [], 1: []}
    for row in make_rows(range(100, 133)):
        prompt = tokenizer(f"User: {row['question']}\nAssistant: ")["input_ids"]
        ids = torch.tensor([*prompt, *tokenizer(row["answer"] + "<|end|>")["input_ids"]])
        mask = torch.arange(len(ids)) >= len(prompt)
        with torch.no_grad():
            gap = response_logprob(trained, ids, mask) - response_logprob(first, ids, mask)
        rewards[row["label"]].append(0.1 * gap.item())
    logged = [record for record in read_metrics(folder) if "eval/kto_loss" in record][-1]
    for label, name in ((1, "eval/chosen_reward"), (0, "eval/reject_reward")):
        mean = sum(rewards[label]) / len(rewards[label])
        assert logged[name] == pytest.approx(mean, abs=1e-5)


def test_the_export_loads_and_prefers_wanted_answers(folder: Path) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "run")
    ids = tokenizer("User: 200?\nAssistant: yes 4<|end|>", return_tensors="pt")["input_ids"]
    trained, first = (load(folder / name)(ids, labels=ids).loss for name in ("run", "model"))
    assert trained < first
