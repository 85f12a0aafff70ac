"""`openrlhf kd`: knowledge distillation."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.runner import Command, loading_libraries, print_notices, run_command
from openrlhf.config.cli import Parsed
from openrlhf.config.supervised import KDConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    run_command(Command("openrlhf kd", KDConfig, _run), argv)


def _run(parsed: Parsed[KDConfig]) -> None:
    with loading_libraries():
        from openrlhf.trainer import kd_trainer, supervised_run  # noqa: PLC0415 - --help must not import torch

    print_notices(parsed.notices)
    supervised_run.run_supervised(kd_trainer.KDTrainer, parsed.config)


if __name__ == "__main__":
    main()
