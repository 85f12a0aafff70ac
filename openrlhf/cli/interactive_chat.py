"""`openrlhf chat`: talk to a model in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.runner import Command, loading_libraries, print_notices, run_command
from openrlhf.config.cli import Parsed
from openrlhf.config.serving import ChatConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and talk."""
    run_command(Command("openrlhf chat", ChatConfig, _run), argv)


def _run(parsed: Parsed[ChatConfig]) -> None:
    with loading_libraries():
        from openrlhf.serving.interactive_chat import run_interactive_chat  # noqa: PLC0415 - --help must not import torch

    print_notices(parsed.notices)
    run_interactive_chat(parsed.config)


if __name__ == "__main__":
    main()
