"""Every supervised command, run as it is typed, on rows that differ from the held-out ones."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from openrlhf.cli import train_dpo, train_kto, train_prm, train_rm, train_sft
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, write_jsonl

FLAGS = (
    "--train_batch_size 16 --micro_train_batch_size 16 --learning_rate 3e-3 --max_epochs 2 "
    "--eval_split train --lr_warmup_ratio 0"
)
TEXT = "--input_key input --output_key chosen"
STEPS = "--input_key steps --label_key labels --placeholder_token # --reward_tokens + -"
RUNS = {
    "sft": (train_sft, f"--pretrain {{}}/model {TEXT} --eval_steps 5"),
    "rm": (train_rm, "--pretrain {}/model --prompt_key input"),
    "dpo": (train_dpo, "--pretrain {}/model --prompt_key input --beta 0.1"),
    # The base under the adapter is its reference, also where it is named.
    "dpo lora": (
        train_dpo,
        "--pretrain {}/model --ref_pretrain {}/model --prompt_key input --beta 0.1 --lora_rank 8",
    ),
    "kto": (train_kto, "--pretrain {}/model --input_key input --output_key output --beta 0.1"),
    "prm": (train_prm, f"--pretrain {{}}/model {STEPS} --max_epochs 3"),
    "experts": (
        train_sft,
        f"--pretrain {{}}/moe {TEXT} --aux_loss_coef 1 --optim muon --muon.lr 0.02 "
        "--learning_rate 1e-2 --gradient_checkpointing --ds.experts_implementation batched_mm",
    ),
}


def make_rows(num_rows: int, seed: int) -> list[dict]:
    """Answers in words are wanted, answers in digits are not; a step is good with an x in it."""
    draw = random.Random(seed)
    rows = []
    for n in range(num_rows):
        chosen, rejected = f"yes {draw.randrange(7)}", f"99{draw.randrange(7)}"
        is_good = [draw.random() < 0.5 for _ in range(3)]
        words = ["".join(draw.choices("abcd", k=3)) + "ex"[good] for good in is_good]
        rows.append(
            {
                "input": f"{draw.randrange(10_000)}?",
                "output": chosen if n % 2 else rejected,
                "label": n % 2,
                "chosen": chosen,
                "rejected": rejected,
                "steps": "".join(f"{word}#" for word in words),
                "labels": ["-+"[good] for good in is_good],
            }
        )
    return rows


TRAINED, HELD_OUT = make_rows(96, seed=0), make_rows(33, seed=1)


def run_commands(folder: Path) -> None:
    for name, (command, flags) in RUNS.items():
        data = f"--dataset {folder}/train.jsonl --eval_dataset {folder}/eval.jsonl"
        words = f"{FLAGS} {data} {flags.replace('{}', str(folder))} --save_path".split()
        command.main([*words, f"{folder}/{name}"])


def make_runs(folder: Path) -> Path:
    """Run every command in a folder; their models are named as in RUNS."""
    make_model(folder / "model")
    make_model(folder / "moe", "mixtral", hidden_size=32, initializer_range=0.2)
    write_jsonl(folder / "train.jsonl", TRAINED)
    write_jsonl(folder / "eval.jsonl", HELD_OUT)
    run_ranks(run_commands, 1, folder)
    return folder


def load(path: Path, kind: str = "CausalLM") -> Any:
    auto_class = getattr(transformers, f"AutoModelFor{kind}")
    model, info = auto_class.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def sequences(path: Path, key: str, prompt: str = "{}") -> list[tuple[Tensor, Tensor]]:
    """Ids and response mask of a column of the held-out rows, as training reads them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    found = []
    for row in HELD_OUT:
        before = tokenizer(prompt.format(row["input"]))["input_ids"]
        ids = torch.tensor([*before, *tokenizer(row[key] + "<|end|>")["input_ids"]])
        found.append((ids, torch.arange(len(ids)) >= len(before)))
    return found
