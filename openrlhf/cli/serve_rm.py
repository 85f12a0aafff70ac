"""`openrlhf serve-rm`: a reward model behind HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.runner import Command, loading_libraries, print_notices, run_command
from openrlhf.config.cli import Parsed
from openrlhf.config.serving import ServeRewardConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and serve until stopped."""
    run_command(Command("openrlhf serve-rm", ServeRewardConfig, _run), argv)


def _run(parsed: Parsed[ServeRewardConfig]) -> None:
    with loading_libraries():
        from openrlhf.serving.reward_server import serve_rewards  # noqa: PLC0415 - --help must not import torch

    print_notices(parsed.notices)
    serve_rewards(parsed.config)


if __name__ == "__main__":
    main()
