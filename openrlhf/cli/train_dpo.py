"""`openrlhf dpo`: preference optimisation on pairs, DPO and its relatives."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.runner import Command, Work
from openrlhf.config.supervised import DPOConfig


def load(config: DPOConfig) -> Work:
    """Import what the command needs, and return what it does."""
    from openrlhf.trainer import dpo_trainer, supervised_run  # noqa: PLC0415 - --help must not import torch

    return partial(supervised_run.run_supervised, dpo_trainer.DPOTrainer, config)


main = Command("openrlhf dpo", DPOConfig, load)

if __name__ == "__main__":
    main()
