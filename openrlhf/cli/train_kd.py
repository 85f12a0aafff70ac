"""`openrlhf kd`: knowledge distillation."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.runner import Command, Work
from openrlhf.config.supervised import KDConfig


def load(config: KDConfig) -> Work:
    """Import what the command needs, and return what it does."""
    from openrlhf.trainer import kd_trainer, supervised_run  # noqa: PLC0415 - --help must not import torch

    return partial(supervised_run.run_supervised, kd_trainer.KDTrainer, config)


main = Command("openrlhf kd", KDConfig, load)

if __name__ == "__main__":
    main()
