"""`openrlhf prm`: process reward model."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.runner import Command, Work
from openrlhf.config.supervised import PRMConfig


def load(config: PRMConfig) -> Work:
    """Import what the command needs, and return what it does."""
    from openrlhf.trainer import prm_trainer, supervised_run  # noqa: PLC0415 - --help must not import torch

    return partial(supervised_run.run_supervised, prm_trainer.PRMTrainer, config)


main = Command("openrlhf prm", PRMConfig, load)

if __name__ == "__main__":
    main()
