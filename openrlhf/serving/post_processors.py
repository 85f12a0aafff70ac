"""What becomes of scored answers: the best of a prompt, its best and worst, or scores in prompts.

Pure functions from rows {input, output, reward, ...} to rows, which keep all other columns; rows
with an equal input are answers to one prompt, and prompts keep the order in which they first came.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from openrlhf.datasets.chat import wrap_input

Row = Mapping[str, Any]
OF_ONE_ANSWER = ("input", "output", "reward", "finish_reason")  # columns that a pair has twice
REWARD_TEMPLATE = "{input} <rm_score>: {reward} "


def best_answers(rows: Sequence[Row]) -> list[Row]:
    """Return the answer with the highest reward of each prompt, the first of equals.

    Example: rewards 1, 3, 3 of one prompt leave the second row.
    """
    return [max(group, key=_reward) for group in by_input(rows)]


def preference_pairs(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """Return the best and worst answer of each prompt, and how many prompts had equal rewards.

    Rows {prompt, chosen, chosen_reward, rejected, rejected_reward} and the other columns of the
    best; a side that met its limit of tokens has its finish reason beside it.
    """
    pairs: list[Row] = []
    num_equal = 0
    for group in by_input(rows):
        best, worst = max(group, key=_reward), min(group, key=_reward)
        if _reward(best) == _reward(worst):
            num_equal += 1
            continue
        pair = {name: value for name, value in best.items() if name not in OF_ONE_ANSWER} | {
            "prompt": best["input"],
            "chosen": best["output"],
            "chosen_reward": _reward(best),
            "rejected": worst["output"],
            "rejected_reward": _reward(worst),
        }
        for side, row in (("chosen", best), ("rejected", worst)):
            if row.get("finish_reason") == "length":
                pair[f"{side}_finish_reason"] = "length"
        pairs.append(pair)
    return pairs, num_equal


def rewards_in_prompts(
    rows: Sequence[Row], template: str | None = None, *, normalize: bool = False
) -> list[Row]:
    """Write each reward, or its z-score, into the prompt with two decimals (conditional SFT).

    Example: input "2+2=" with reward 1 becomes "2+2= <rm_score>: 1.00 ".
    """
    rewards = [_reward(row) for row in rows]
    shown = z_scores(rewards) if normalize else rewards
    form = template or REWARD_TEMPLATE
    return [
        {**row, "input": wrap_input(row["input"], form.replace("{reward}", f"{value:.2f}"))}
        for row, value in zip(rows, shown, strict=True)
    ]


def wish_template(csft_prompt: str) -> str:
    """Return the template of a prompt with a wished reward: behind it, as the default writes it.

    A wish with `{input}` in it says itself where, as a model learnt it by another template.
    Example: "<rm_score>: 5.00" gives "{input} <rm_score>: 5.00 ".
    """
    return csft_prompt if "{input}" in csft_prompt else f"{{input}} {csft_prompt.strip()} "


def z_scores(values: Sequence[float]) -> list[float]:
    """Return (x - mean) / standard deviation of all values; 0 if they are all the same."""
    if not values:
        return []
    mean, spread = statistics.fmean(values), statistics.pstdev(values)
    return [(value - mean) / spread if spread > 0 else 0.0 for value in values]


def by_input(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each prompt, text or messages, in the order of their first rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        asked = [row["input"], row.get("tools")]
        groups.setdefault(json.dumps(asked, sort_keys=True), []).append(row)
    return list(groups.values())


def _reward(row: Row) -> float:
    return float(row["reward"])
