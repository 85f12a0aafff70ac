"""An adapter learns in every supervised command while ZeRO-3 splits base and adapter over two
ranks; merged into its base, it is the model that the trainer evaluated.
"""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from openrlhf.cli.lora_combiner import main as combine
from tests.distributed.spawn import meet_elsewhere, run_ranks
from tests.integration.test_launchers import DOCUMENTED, documented_row
from tests.tiny import make_model, write_jsonl
from tests.trainer.gradients import response_logprob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_ROWS, NUM_HELD_OUT = 256, 17  # 17 on two ranks: one has fewer
COMMON = (
    "--train_batch_size 16 --max_epochs 1 --lr_warmup_ratio 0 --eval_split train --zero_stage 3 "
    "--lora_rank 8 --lora_alpha 32 --micro_train_batch_size 4 --learning_rate 1e-2"
)


def train_all(folder: Path) -> None:
    """Every command's adapter."""
    for method, (flags, _, _) in DOCUMENTED.items():
        meet_elsewhere()
        words = flags.format(root=folder).partition(" --use_wandb")[0].split()
        template = ["--input_template", "{}"] if method in ("sft", "kd") else []
        paths = (
            f"--pretrain {folder}/model --dataset {folder}/rows.jsonl --eval_dataset "
            f"{folder}/held_out.jsonl --save_path {folder}/{method}"
        )
        command = importlib.import_module(f"openrlhf.cli.train_{method}")
        command.main([*paths.split(), *words, *template, *COMMON.split()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    make_model(folder / "model")
    make_model(folder / "teacher", num_layers=1, seed=3)
    numbers = random.Random(0).sample(range(1000), NUM_ROWS + NUM_HELD_OUT)
    rows = [documented_row(i) for i in numbers]
    write_jsonl(folder / "rows.jsonl", rows[:NUM_ROWS])
    write_jsonl(folder / "held_out.jsonl", rows[NUM_ROWS:])
    run_ranks(train_all, 2, folder)
    return folder


def records(folder: Path, method: str) -> list[dict]:
    path = folder / method / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def held_out_value(folder: Path, method: str, metric: str) -> float:
    [value] = [r[f"eval/{metric}"] for r in records(folder, method) if f"eval/{metric}" in r]
    return value


@pytest.mark.parametrize("method", DOCUMENTED)
def test_an_adapter_learns_what_is_seen_on_new_rows(folder: Path, method: str) -> None:
    _, metric, change = DOCUMENTED[method]
    if metric == "gpt_loss":  # under a random head and embeddings, which stay as they are
        change = -0.6
    first = next(record for record in records(folder, method) if "grad_norm" in record)
    start = 0.0 if metric == "reward_margin" else first[metric]
    assert (held_out_value(folder, method, metric) - start) / change > 1
    assert (folder / method / "adapter_model.safetensors").is_file()
    assert not (folder / method / "model.safetensors").exists()


def merged(folder: Path, method: str, *flags: str) -> Path:
    output = folder / f"{method}_merged"
    paths = f"--model_path {folder}/model --lora_path {folder}/{method} --output_path {output}"
    combine([*paths.split(), *flags])
    return output


def held_out_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]


def test_a_merged_policy_has_the_loss_that_was_logged(folder: Path) -> None:
    path = merged(folder, "sft")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    total, count = 0.0, 0
    for row in held_out_rows(folder):
        prompt = tokenizer(row["question"]).input_ids
        ids = torch.tensor([*prompt, *tokenizer(row["response"]).input_ids, tokenizer.eos_token_id])
        with torch.no_grad():
            total -= response_logprob(model, ids, torch.arange(len(ids)) >= len(prompt)).item()
        count += len(ids) - len(prompt)
    assert total / count == pytest.approx(held_out_value(folder, "sft", "gpt_loss"), rel=1e-4)


def test_a_merged_reward_model_has_the_scores_that_were_logged(folder: Path) -> None:
    path = merged(folder, "rm", "--is_rm")
    auto_class = transformers.AutoModelForSequenceClassification
    model, info = auto_class.from_pretrained(path, output_loading_info=True)
    assert not any(info.values())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    for side, metric in (("chosen", "chosen_reward"), ("rejected", "reject_reward")):
        scores = []
        for row in held_out_rows(folder):
            ids = tokenizer(tokenizer.apply_chat_template(row[side], tokenize=False)).input_ids
            with torch.no_grad():
                scores.append(model(torch.tensor([ids])).logits.item())
        mean = sum(scores) / len(scores)
        assert mean == pytest.approx(held_out_value(folder, "rm", metric), rel=1e-3, abs=1e-3)
