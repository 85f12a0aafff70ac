"""`openrlhf sft`: supervised fine-tuning and continued pre-training."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.runner import Command, Work
from openrlhf.config.supervised import SFTConfig


def load(config: SFTConfig) -> Work:
    """Import what the command needs, and return what it does."""
    from openrlhf.trainer import sft_trainer, supervised_run  # noqa: PLC0415 - --help must not import torch

    return partial(supervised_run.run_supervised, sft_trainer.SFTTrainer, config)


main = Command("openrlhf sft", SFTConfig, load)

if __name__ == "__main__":
    main()
