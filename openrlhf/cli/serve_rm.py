"""`openrlhf serve-rm`: a reward model behind HTTP."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.runner import Command, Work
from openrlhf.config.serving import ServeRewardConfig


def load(config: ServeRewardConfig) -> Work:
    """Import what the command needs, and return what it does."""
    from openrlhf.serving.reward_server import serve_rewards  # noqa: PLC0415 - --help must not import torch

    return partial(serve_rewards, config)


main = Command("openrlhf serve-rm", ServeRewardConfig, load)

if __name__ == "__main__":
    main()
