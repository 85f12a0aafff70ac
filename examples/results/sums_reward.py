"""1 for a response whose last number is the sum, else 0."""

import re


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str], responses: list[str]
) -> dict[str, list[float]]:
    """Return rewards, which are the scores too."""
    numbers = [re.findall(r"\d+", response) for response in responses]
    scores = [
        float(found[-1:] == [str(label)]) for found, label in zip(numbers, labels, strict=True)
    ]
    return {"rewards": scores, "scores": scores}
