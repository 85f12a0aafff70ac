"""One optimizer step of every supervised command, from its words."""

from typing import Any

from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
)
from openrlhf.trainer.dpo_trainer import DPOTrainer
from openrlhf.trainer.kd_trainer import KDTrainer
from openrlhf.trainer.kto_trainer import KTOTrainer
from openrlhf.trainer.prm_trainer import PRMTrainer
from openrlhf.trainer.rm_trainer import RMTrainer
from openrlhf.trainer.sft_trainer import SFTTrainer

BETA = 0.3
TEXT = "--input_key input --output_key output --input_template {{}}"
STEPS = "--input_key steps --label_key labels --placeholder_token #"
COMMANDS: dict[str, tuple[Any, Any, str]] = {
    "sft": (SFTConfig, SFTTrainer, TEXT),
    "dpo": (DPOConfig, DPOTrainer, f"--prompt_key input --ref_pretrain {{other}} --beta {BETA}"),
    "rm": (RMConfig, RMTrainer, "--prompt_key input"),
    "kto": (KTOConfig, KTOTrainer, f"{TEXT} --beta {BETA}"),
    "prm": (PRMConfig, PRMTrainer, STEPS),
    "kd": (KDConfig, KDTrainer, f"{TEXT} --teacher_model {{other}}"),
}


def make_row(n: int) -> dict:
    """A row that every command can read; lengths differ."""
    words = [("p" * 19, "r" * 4), ("p" * 3, "qrst" * 7), (f"{n}", "za")][n % 3]
    prompt, answer = f"{n}{words[0]} ", f"{words[1]}{n * n}"
    return {
        "input": prompt,
        "output": answer,
        "chosen": answer,
        "rejected": f"{7 * n}x",
        "margin": 0.3 * n - 1,
        "label": int(n % 3 > 0),
        "steps": f"{prompt}#{answer}#",
        "labels": ["+", "+-"[n % 2]],
    }
