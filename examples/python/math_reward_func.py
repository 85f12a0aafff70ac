"""Mathematics with a known answer: 1 when the response ends in what equals the label, else 0.

openrlhf train_ppo_ray ... --remote_rm_url examples/python/math_reward_func.py --label_key answer
"""

import re

from openrlhf.rewards.math_grader import math_equal

DIGIT_OR_BOX = re.compile(r"\d|\\boxed\{")


def reward_func(queries: list[str], prompts: list[str], labels: list[object]) -> dict[str, object]:
    """Compare as mathematics: 0.5, 1/2 and \\boxed{\\frac12} are equal. A box counts before what
    stands last; a response without either scores 0.
    """
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    scores = [
        float(math_equal(response, _text(label)))
        for response, label in zip(responses, labels, strict=True)
    ]
    has_answer = [float(bool(DIGIT_OR_BOX.search(response))) for response in responses]
    return {"rewards": scores, "scores": scores, "extra_logs": {"has_answer": has_answer}}


def _text(label: object) -> str:
    """Return 2, 3 for the label ["2", "3"]."""
    return ", ".join(map(str, label)) if isinstance(label, list) else str(label)
