"""One optimizer step of every supervised command, from its words."""

from pkgutil import resolve_name
from typing import Any

from openrlhf.config.methods import METHODS

BETA = 0.3
TEXT = "--input_key input --output_key output --input_template {{}}"
WORDS = {
    "sft": TEXT,
    "dpo": f"--prompt_key input --ref_pretrain {{other}} --beta {BETA}",
    "rm": "--prompt_key input",
    "kto": f"{TEXT} --beta {BETA}",
    "prm": "--input_key steps --label_key labels --placeholder_token #",
    "kd": f"{TEXT} --teacher_model {{other}}",
}
COMMANDS: dict[str, tuple[Any, Any, str]] = {
    name: (method.config_class, resolve_name(method.recipe), WORDS[name])
    for name, method in METHODS.items()
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
