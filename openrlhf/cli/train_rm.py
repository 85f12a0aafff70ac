"""`openrlhf rm`: pairwise reward model."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.runner import Command, Work
from openrlhf.config.supervised import RMConfig


def load(config: RMConfig) -> Work:
    """Import what the command needs, and return what it does."""
    from openrlhf.trainer import rm_trainer, supervised_run  # noqa: PLC0415 - --help must not import torch

    return partial(supervised_run.run_supervised, rm_trainer.RMTrainer, config)


main = Command("openrlhf rm", RMConfig, load)

if __name__ == "__main__":
    main()
