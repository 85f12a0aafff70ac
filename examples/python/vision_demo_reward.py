"""Reward of `make demo-vision`: 1 for the right word alone."""

from collections.abc import Sequence


def reward_func(labels: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Return a reward for each response."""
    return [float(said.strip() == label) for said, label in zip(responses, labels, strict=True)]
