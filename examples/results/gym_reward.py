"""1 for a response whose last number reasoning-gym takes for the answer, else 0."""

import re

from reasoning_gym import get_score_answer_fn

# Those of the tasks of make_gym.py compare numbers, and none reads more of a row than its answer.
score_answer = get_score_answer_fn("chain_sum")


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str], responses: list[str]
) -> dict[str, list[float]]:
    """Return rewards, which are the scores too."""
    scores = []
    for response, label in zip(responses, labels, strict=True):
        [*_, number] = re.findall(r"-?\d+", response) or [""]
        scores.append(float(score_answer(number, {"answer": label}) == 1))
    return {"rewards": scores, "scores": scores}
