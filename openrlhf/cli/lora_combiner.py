"""`openrlhf merge-lora`: merge an adapter into its base model."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.runner import Command, Work
from openrlhf.config.serving import LoraCombinerConfig


def load(config: LoraCombinerConfig) -> Work:
    """Import what the command needs, and return what it does."""
    from openrlhf.trainer.lora_combiner import run_lora_combiner  # noqa: PLC0415 - --help must not import torch

    return partial(run_lora_combiner, config)


main = Command("openrlhf merge-lora", LoraCombinerConfig, load)

if __name__ == "__main__":
    main()
