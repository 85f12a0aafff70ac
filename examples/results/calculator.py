"""A calculator for products that a small model cannot compute: it may ask once.

A response such as `calc(348 * 27)` is a question to the calculator, whose result the model reads;
any other response ends the episode, with reward 1 if its last number is the product.
"""

import re
from typing import Any

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

CALL = re.compile(r"calc\(\s*(\d{1,6})\s*[*x×]\s*(\d{1,6})\s*\)")
RESULT = "\n<|im_start|>user\nThe calculator says {}.<|im_end|>\n<|im_start|>assistant\n"


class Calculator(AgentInstanceBase):
    """One product."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Answer a call, or score the response."""
        said = states["action_text"]
        call = CALL.search(said)
        goes_on = call is not None and self.num_calls == 0
        self.num_calls += goes_on
        numbers = re.findall(r"\d+", said)
        is_right = float(not goes_on and numbers[-1:] == [states["label"]])
        return {
            "rewards": is_right,
            "scores": is_right,
            "environment_feedback": RESULT.format(int(call[1]) * int(call[2])) if call else "",
            "done": not goes_on,
            "extra_logs": {"calls": self.num_calls},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """Run the episodes."""

    def __init__(self) -> None:
        super().__init__(Calculator)
