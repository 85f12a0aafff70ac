"""`openrlhf prm`: process reward model."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.runner import Command, loading_libraries, print_notices, run_command
from openrlhf.config.cli import Parsed
from openrlhf.config.supervised import PRMConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    run_command(Command("openrlhf prm", PRMConfig, _run), argv)


def _run(parsed: Parsed[PRMConfig]) -> None:
    with loading_libraries():
        from openrlhf.trainer import prm_trainer, supervised_run  # noqa: PLC0415 - --help must not import torch

    print_notices(parsed.notices)
    supervised_run.run_supervised(prm_trainer.PRMTrainer, parsed.config)


if __name__ == "__main__":
    main()
