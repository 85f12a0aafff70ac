"""`openrlhf kto`: preference optimisation on single good and bad answers."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.runner import Command, loading_libraries, print_notices, run_command
from openrlhf.config.cli import Parsed
from openrlhf.config.supervised import KTOConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    run_command(Command("openrlhf kto", KTOConfig, _run), argv)


def _run(parsed: Parsed[KTOConfig]) -> None:
    with loading_libraries():
        from openrlhf.trainer import kto_trainer, supervised_run  # noqa: PLC0415 - --help must not import torch

    print_notices(parsed.notices)
    supervised_run.run_supervised(kto_trainer.KTOTrainer, parsed.config)


if __name__ == "__main__":
    main()
