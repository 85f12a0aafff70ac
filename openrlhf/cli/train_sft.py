"""`openrlhf sft`: supervised fine-tuning and continued pre-training."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.runner import Command, loading_libraries, print_notices, run_command
from openrlhf.config.cli import Parsed
from openrlhf.config.supervised import SFTConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    run_command(Command("openrlhf sft", SFTConfig, _run), argv)


def _run(parsed: Parsed[SFTConfig]) -> None:
    with loading_libraries():
        from openrlhf.trainer import sft_trainer, supervised_run  # noqa: PLC0415 - --help must not import torch

    print_notices(parsed.notices)
    supervised_run.run_supervised(sft_trainer.SFTTrainer, parsed.config)


if __name__ == "__main__":
    main()
