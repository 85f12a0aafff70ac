"""Arithmetic with a known answer: 1 when the last number of the response equals the label, else 0.

openrlhf train_ppo_ray ... --remote_rm_url examples/python/math_reward_func.py --label_key answer
"""

from __future__ import annotations

import re
from fractions import Fraction

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def reward_func(queries: list[str], prompts: list[str], labels: list[object]) -> dict[str, object]:
    """Exact comparison of numbers: 0.5, 1/2 and .50 are equal; a response without a number scores
    0.
    """
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    answers = [_last_number(response) for response in responses]
    scores = [
        float(answer is not None and answer == _last_number(str(label)))
        for answer, label in zip(answers, labels, strict=True)
    ]
    has_answer = [float(answer is not None) for answer in answers]
    return {"rewards": scores, "scores": scores, "extra_logs": {"has_answer": has_answer}}


def _last_number(text: str) -> Fraction | None:
    found = NUMBER.findall(text)
    if not found:
        return None
    try:
        return Fraction(found[-1].replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None
