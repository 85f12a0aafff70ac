"""`openrlhf merge-lora`: merge an adapter into its base model."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.runner import Command, loading_libraries, print_notices, run_command
from openrlhf.config.cli import Parsed
from openrlhf.config.serving import LoraCombinerConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and merge."""
    run_command(Command("openrlhf merge-lora", LoraCombinerConfig, _run), argv)


def _run(parsed: Parsed[LoraCombinerConfig]) -> None:
    with loading_libraries():
        from openrlhf.trainer.lora_combiner import run_lora_combiner  # noqa: PLC0415 - --help must not import torch

    print_notices(parsed.notices)
    run_lora_combiner(parsed.config)


if __name__ == "__main__":
    main()
