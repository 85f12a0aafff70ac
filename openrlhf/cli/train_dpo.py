"""`openrlhf dpo`: preference optimisation on pairs, DPO and its relatives."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.runner import Command, loading_libraries, print_notices, run_command
from openrlhf.config.cli import Parsed
from openrlhf.config.supervised import DPOConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    run_command(Command("openrlhf dpo", DPOConfig, _run), argv)


def _run(parsed: Parsed[DPOConfig]) -> None:
    with loading_libraries():
        from openrlhf.trainer import dpo_trainer, supervised_run  # noqa: PLC0415 - --help must not import torch

    print_notices(parsed.notices)
    supervised_run.run_supervised(dpo_trainer.DPOTrainer, parsed.config)


if __name__ == "__main__":
    main()
