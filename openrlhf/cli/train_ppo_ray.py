"""`openrlhf ppo`: reinforcement learning on Ray."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.runner import Command, Work
from openrlhf.config.ppo import PPOConfig


def load(config: PPOConfig) -> Work:
    """Import what the command needs, and return what it does."""
    from openrlhf.trainer.ppo_run import run_ppo_ray  # noqa: PLC0415 - --help must not import torch

    return partial(run_ppo_ray, config)


main = Command("openrlhf ppo", PPOConfig, load)

if __name__ == "__main__":
    main()
