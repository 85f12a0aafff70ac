"""Supervised trainers: rows of log-normal lengths, 64 a step, ours and TRL's.

Each side gets the same rows, model, dtype and threads; both are warmed up and the median step
counts. `python -m benchmarks.supervised NAME FOLDER [FIELD=VALUE ...]` prints one JSON object. The
fields are those of `benchmarks.workload.Workload`.
"""

import json
import resource
import statistics
import sys
import time
from itertools import pairwise

import torch

from benchmarks.limits import MicroBatch, limit_s
from benchmarks.workload import Workload, digits

MEAN_LOG, STD_LOG = 4.4, 0.75  # lengths: log-normal, cut to 16..512 tokens, mean about 104
PROMPT_TOKENS = 8
MAX_TOKENS = 2048  # of a micro-batch of ours
Measurement = dict[str, float]


def num_steps_of(work: Workload) -> int:
    """Return the steps of a run."""
    return work.num_steps or 7


def lengths(num_rows: int, seed: int) -> list[int]:
    """Token counts of rows."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(num_rows, generator=generator) * STD_LOG + MEAN_LOG
    return draws.exp().clamp(16, 512).long().tolist()


def completion_rows(num_rows: int) -> list[dict[str, str]]:
    """{prompt, completion}; the last token is the end that both sides put."""
    return [
        {"prompt": digits(PROMPT_TOKENS, i), "completion": digits(n - PROMPT_TOKENS - 1, i + 1)}
        for i, n in enumerate(lengths(num_rows, 1))
    ]


def pair_rows(num_rows: int) -> list[dict[str, str]]:
    """{prompt, chosen, rejected}, each side of its own length."""
    both = zip(lengths(num_rows, 1), lengths(num_rows, 2), strict=True)
    return [
        {
            "prompt": digits(PROMPT_TOKENS, i),
            "chosen": digits(first - PROMPT_TOKENS - 1, i + 1),
            "rejected": digits(second - PROMPT_TOKENS - 1, i + 2),
        }
        for i, (first, second) in enumerate(both)
    ]


def tokens_a_step(rows: list[dict[str, str]], num_rows: int) -> float:
    """Mean tokens of a step: every side with its prompt and its end."""
    sides = [name for name in rows[0] if name != "prompt"]
    total = sum(len(row["prompt"]) + len(row[side]) + 1 for row in rows for side in sides)
    return total / len(rows) * num_rows


def ours(kind: str, work: Workload) -> Measurement:
    """Our command: packed under a token budget."""
    from openrlhf.cli import train_dpo, train_rm, train_sft
    from openrlhf.utils.tracker import read_metrics

    folder = work.folder
    rows = (completion_rows if kind == "sft" else pair_rows)(work.num_rows * num_steps_of(work))
    data = folder / f"{kind}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = {"sft": train_sft, "dpo": train_dpo, "rm": train_rm}[kind]
    keys = {"sft": "--input_key prompt --output_key completion --input_template {}"}
    argv = (
        f"--pretrain {work.model} --dataset {data} --max_len 1024 --max_epochs 1 "
        f"--train_batch_size {work.num_rows} --micro_train_batch_size {work.num_rows} "
        f"--use_dynamic_batch --train_max_tokens_per_gpu {MAX_TOKENS} --learning_rate 1e-6 "
        f"--zero_stage 0 --param_dtype {work.dtype} --save_path {folder / kind} "
        f"{keys.get(kind, '--prompt_key prompt')}"
    ).split()
    command.main(argv)
    steps = [
        record["timing/step_total"]
        for record in read_metrics(folder / kind / "metrics.jsonl")
        if "timing/step_total" in record
    ]
    return {
        "seconds": statistics.median(steps[work.num_warm :]),
        "tokens": tokens_a_step(rows, work.num_rows),
    }


def trl_side(kind: str, work: Workload) -> Measurement:
    """TRL's trainer with its defaults but for the micro-batch, as its documents show it."""
    import datasets
    import trl
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )

    rows = (completion_rows if kind == "sft" else pair_rows)(work.num_rows * num_steps_of(work))
    ends: list[float] = []
    micro_batch = work.micro_batch or work.num_rows

    class Clock(TrainerCallback):
        """Notes when steps end."""

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.monotonic())

    config_class, trainer_class = {
        "sft": (trl.SFTConfig, trl.SFTTrainer),
        "dpo": (trl.DPOConfig, trl.DPOTrainer),
        "rm": (trl.RewardConfig, trl.RewardTrainer),
    }[kind]
    args = config_class(
        output_dir=str(work.folder / f"trl-{kind}"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=work.num_rows // micro_batch,
        max_steps=num_steps_of(work),
        max_length=1024,
        learning_rate=1e-6,
        bf16=work.dtype == "bf16",
        fp16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    load = AutoModelForCausalLM
    options = {}
    if kind == "rm":
        load, options = AutoModelForSequenceClassification, {"num_labels": 1}
    model = load.from_pretrained(work.model, dtype=torch.float32, **options)
    model.config.pad_token_id = tokenizer.pad_token_id
    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    times = [after - before for before, after in pairwise(ends[work.num_warm - 1 :])]
    return {"seconds": statistics.median(times), "tokens": tokens_a_step(rows, work.num_rows)}


def limit(kind: str, work: Workload) -> Measurement:
    """The matrix products and attention of a step by themselves, the mean of the steps; DPO has a
    forward of the reference, and a reward model no LM head.
    """
    num_steps = num_steps_of(work)
    lengths_of_all = lengths(work.num_rows * num_steps, 1)
    if kind != "sft":
        lengths_of_all += lengths(work.num_rows * num_steps, 2)
    batches = [
        MicroBatch(
            of_batch,
            head_rows=0 if kind == "rm" else sum(of_batch) - PROMPT_TOKENS * len(of_batch),
            backward=backward,
        )
        for of_batch in packed(lengths_of_all)
        for backward in ((True, False) if kind == "dpo" else (True,))
    ]
    took, gflops = limit_s(work.model, batches, work.torch_dtype)
    return {"seconds": took / num_steps, "gflops": gflops}


def packed(lengths_of_all: list[int]) -> list[list[int]]:
    """Return micro-batches of up to MAX_TOKENS, in order."""
    batches: list[list[int]] = [[]]
    for length in lengths_of_all:
        if sum(batches[-1]) + length > MAX_TOKENS:
            batches.append([])
        batches[-1].append(length)
    return batches


SIDES = {"ours": ours, "trl": trl_side, "limit": limit}


def main() -> None:
    """Measure what the command line names: `ours_sft`, `trl_dpo`, `limit_rm` and so on."""
    name, folder, *words = sys.argv[1:]
    side, _, kind = name.partition("_")
    found = SIDES[side](kind, Workload.parsed(folder, words))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print("RESULT " + json.dumps(found | {"peak_gib": peak}))


if __name__ == "__main__":
    main()
