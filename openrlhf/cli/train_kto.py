"""`openrlhf kto`: preference optimisation on single good and bad answers."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.runner import Command, Work
from openrlhf.config.supervised import KTOConfig


def load(config: KTOConfig) -> Work:
    """Import what the command needs, and return what it does."""
    from openrlhf.trainer import kto_trainer, supervised_run  # noqa: PLC0415 - --help must not import torch

    return partial(supervised_run.run_supervised, kto_trainer.KTOTrainer, config)


main = Command("openrlhf kto", KTOConfig, load)

if __name__ == "__main__":
    main()
