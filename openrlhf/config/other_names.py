"""Well-known names of other libraries, and what stands for them here."""

from __future__ import annotations

import re
from collections.abc import Container

REMEDIES = {
    "epsilon": "Type --eps_clip.",
    "fp16": "Type --ds.param_dtype fp16.",
    "gradient_accumulation_steps": (
        "It follows from --train_batch_size and --micro_train_batch_size: leave it out."
    ),
    "max_completion_length": "Type --generate_max_len.",
    "max_prompt_length": "Type --prompt_max_len.",
    "model": "Type --pretrain.",
    "num_generations": "Type --n_samples_per_prompt.",
    "num_iterations": "Type --max_epochs.",
}


def remedy_for(name: str, known: Container[str]) -> str | None:
    """What to type for a name of another library, if this command knows those flags."""
    remedy = REMEDIES.get(name)
    is_fitting = remedy is not None and all(flag in known for flag in flags_in(remedy))
    return remedy if is_fitting else None


def flags_in(remedy: str) -> list[str]:
    """The flags that a remedy names, without their dashes."""
    return re.findall(r"--([a-z0-9_]+(?:\.[a-z0-9_]+)*)", remedy)
