"""`openrlhf ppo-local`: reinforcement learning in the launching process(es), without Ray."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.runner import Command, loading_libraries, run_command
from openrlhf.config.cli import Parsed
from openrlhf.config.ppo import PPOConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    run_command(Command("openrlhf ppo-local", PPOConfig, _run), argv)


def _run(parsed: Parsed[PPOConfig]) -> None:
    with loading_libraries():
        from openrlhf.trainer.ppo_run import run_ppo_local  # noqa: PLC0415 - --help must not import torch

    run_ppo_local(parsed.config, notices=parsed.notices)


if __name__ == "__main__":
    main()
