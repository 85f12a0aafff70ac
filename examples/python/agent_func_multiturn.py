"""A guessing game over several turns: the environment says higher or lower until it is found.

openrlhf train_ppo_ray ... --label_key answer \
    --agent_func_path examples/python/agent_func_multiturn.py

Rows have a number between 0 and 100 as their label. The executor has the newer of the two shapes.
"""

import re
from typing import Any

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

MAX_GUESSES = 7  # halving finds any number from 0 to 100 in so many


class AgentInstance(AgentInstanceBase):
    """One game."""

    def __init__(self) -> None:
        self.num_guesses = 0

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Compare the last number of the answer with the label."""
        self.num_guesses += 1
        target = int(states["label"])
        numbers = re.findall(r"\d+", states["action_text"])
        guess = int(numbers[-1]) if numbers else None
        is_found = guess == target
        return {
            "rewards": 1.0 if is_found else -0.05,
            "scores": float(is_found),
            "environment_feedback": "" if is_found else f"\n{_hint(guess, target)}\nYour guess: ",
            "done": is_found or self.num_guesses == MAX_GUESSES,
            "extra_logs": {"num_guesses": self.num_guesses},
        }


def _hint(guess: int | None, target: int) -> str:
    if guess is None:
        return "Write a number."
    return "Higher." if guess < target else "Lower."


class AgentExecutor(MultiTurnAgentExecutor):
    """Plays the games."""

    def __init__(self) -> None:
        super().__init__(AgentInstance)
