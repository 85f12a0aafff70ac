"""Rules that several commands share.

Each yields one line for a problem: what is wrong, the value, what to type.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openrlhf.config.common import DeepSpeedConfig, OptimizerConfig

# The names of transformers.SchedulerType; written out because importing transformers takes seconds.
SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "greedy",
)


def is_blank(text: str | None) -> bool:
    """Whether a name is unset or empty."""
    return text is None or not text.strip()


def batch_problems(micro_batch_size: int, batch_size: int) -> Iterator[str]:
    """A micro-batch cannot hold more than the batch it is a part of."""
    if micro_batch_size > batch_size:
        yield (
            f"--micro_train_batch_size {micro_batch_size} is more than --train_batch_size "
            f"{batch_size}. Type --micro_train_batch_size {batch_size} or "
            f"--train_batch_size {micro_batch_size}."
        )


def schedule_problems(name: str) -> Iterator[str]:
    """The schedule is one that transformers has."""
    if name not in SCHEDULERS:
        near = get_close_matches(name, SCHEDULERS, n=1)
        remedy = f"--lr_scheduler {near[0]}" if near else f"one of {', '.join(SCHEDULERS)}"
        yield f"--lr_scheduler is not a known schedule: {name}. Type {remedy}."


def precision_problems(ds: DeepSpeedConfig) -> Iterator[str]:
    """What holds for weights of 4 bits; fp32 gradients are summed in fp32."""
    if ds.load_in_4bit:
        yield from four_bit_problems(ds, can_learn=ds.lora.rank > 0)
    if ds.param_dtype == "fp32" and ds.grad_accum_dtype in ("bf16", "fp16"):
        yield (
            f"--grad_accum_dtype {ds.grad_accum_dtype} with fp32 parameters: add --bf16 or leave "
            "it out."
        )


def four_bit_problems(ds: DeepSpeedConfig, *, can_learn: bool) -> Iterator[str]:
    """Weights of 4 bits stay whole, and only an adapter on them can learn."""
    if not can_learn:
        yield (
            "--load_in_4bit trains adapters, and --lora_rank is 0. Add --lora_rank 16 or leave "
            "--load_in_4bit out."
        )
    if ds.zero_stage == 3:
        yield (
            "--load_in_4bit with --zero_stage 3: 4-bit weights cannot be split over ranks. "
            "Type --zero_stage 2."
        )


def muon_notes(config: OptimizerConfig) -> Iterator[str]:
    """What DeepSpeed's Muon decides by itself."""
    if config.optim != "muon":
        return
    if config.muon.ns_steps != 5 or not config.muon.nesterov:
        yield "--muon.ns_steps and --muon.nesterov have no effect: DeepSpeed's Muon sets them."
    if config.max_norm != 1.0:
        yield f"--max_norm {config.max_norm:g} has no effect on Muon's steps: they are orthogonal."
