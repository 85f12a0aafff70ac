"""`openrlhf kd`: knowledge distillation."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.runner import Command, loading_libraries, print_notices, run_command
from openrlhf.config.cli import Parsed
from openrlhf.config.distillation import KDConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    run_command(Command("openrlhf kd", KDConfig, _run), argv)


def _run(parsed: Parsed[KDConfig]) -> None:
    with loading_libraries():
        from openrlhf.trainer.kd_trainer import run_kd  # noqa: PLC0415 - --help must not import torch

    print_notices(parsed.notices)
    run_kd(parsed.config)


if __name__ == "__main__":
    main()
