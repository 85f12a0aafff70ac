"""SFT and DPO of offline.sh with TRL: same model, rows, rate and schedule.

    python examples/results/offline_trl.py FOLDER sft|dpo SEED [MICRO_BATCH]

Prints a line a step: its number, the loss, the seconds of training and the most memory that the
process held, in GiB. The model is saved to FOLDER/trl-KIND.
"""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from sums_trl import MODEL, Clock
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 64
COMMON = {
    "num_train_epochs": 2,
    "max_length": 128,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "warmup_steps": 0.03,
    "adam_beta2": 0.95,
    "bf16": True,
    "use_cpu": not torch.cuda.is_available(),
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def turn(role: str, text: str) -> list[dict[str, str]]:
    """Return a dialogue of one message."""
    return [{"role": role, "content": text}]


def rows_of(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of offline.sh in TRL's columns."""
    name = {"sft": "right", "dpo": "pairs"}[kind]
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    columns = {"sft": {"completion": "output"}, "dpo": {"chosen": "chosen", "rejected": "rejected"}}
    return [
        {
            "prompt": turn("user", row["question"]),
            **{theirs: turn("assistant", row[ours]) for theirs, ours in columns[kind].items()},
        }
        for row in rows
    ]


def main() -> None:
    """Train and save."""
    where, kind, seed, *more = sys.argv[1:]
    folder, micro_batch = Path(where), int(more[0]) if more else 8
    sizes = {
        "output_dir": str(folder / f"trl-{kind}"),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": BATCH // micro_batch,
        "seed": int(seed),
    }
    if kind == "sft":
        args, trainer_class = trl.SFTConfig(learning_rate=2e-5, **sizes, **COMMON), trl.SFTTrainer
    else:
        args = trl.DPOConfig(learning_rate=1e-5, beta=0.1, **sizes, **COMMON)
        trainer_class = trl.DPOTrainer
    trainer = trainer_class(
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows_of(kind, folder)),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        callbacks=[Clock(value="loss")],
    )
    trainer.train()
    trainer.save_model(str(folder / f"trl-{kind}"))


if __name__ == "__main__":
    main()
