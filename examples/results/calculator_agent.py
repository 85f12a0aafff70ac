"""An environment with a calculator: a turn `calculate: 123 + 456` gets the sum, any other is the
answer.
"""

import re
from typing import Any

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

CALL = re.compile(r"calculate: *(\d+) *\+ *(\d+) *$")
MAX_CALLS = 2


class Calculator(AgentInstanceBase):
    """One question. The reward is 1 for the right number at the end."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def reset(self, states: dict[str, Any]) -> dict[str, Any]:
        """Begin with the question as it is."""
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any]) -> dict[str, Any]:
        """Answer a call, or judge the answer."""
        said = states["action_text"].removesuffix("<|im_end|>").strip()
        call, result = CALL.match(said), ""
        if call and self.num_calls < MAX_CALLS:
            self.num_calls += 1
            result = f"result: {int(call[1]) + int(call[2])}"
        score = float(not result and re.findall(r"\d+", said)[-1:] == [str(states["label"])])
        return {
            "rewards": score,
            "scores": score,
            "environment_feedback": (
                f"\n<|im_start|>user\n{result}<|im_end|>\n<|im_start|>assistant\n" if result else ""
            ),
            "done": not result,
            "extra_logs": {"calls": float(self.num_calls)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """Runs the episodes."""

    def __init__(self) -> None:
        super().__init__(Calculator)
