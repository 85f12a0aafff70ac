"""`openrlhf chat`: talk to a model in the terminal."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.runner import Command, Work
from openrlhf.config.serving import ChatConfig


def load(config: ChatConfig) -> Work:
    """Import what the command needs, and return what it does."""
    from openrlhf.serving.interactive_chat import run_interactive_chat  # noqa: PLC0415 - --help must not import torch

    return partial(run_interactive_chat, config)


main = Command("openrlhf chat", ChatConfig, load)

if __name__ == "__main__":
    main()
