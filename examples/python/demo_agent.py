"""An environment for the sums of `make demo`: a wrong answer gets one more try, at half the reward.

The executor has the newer of the two shapes, made from the environment alone.
"""

from typing import Any

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

END = "<|end|>"
RETRY = "<|user|>no<|end|><|assistant|>"  # special tokens keep their meaning in feedback
REWARDS = (1.0, 0.5)  # of a right answer, by try


class AgentInstance(AgentInstanceBase):
    """One sum."""

    def __init__(self) -> None:
        self.num_tries = 0

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Compare the answer with the label."""
        is_right = states["action_text"].removesuffix(END).strip() == states["label"]
        reward = REWARDS[self.num_tries] if is_right else 0.0
        self.num_tries += 1
        return {
            "rewards": reward,
            "scores": float(is_right),
            "environment_feedback": RETRY,
            "done": is_right or self.num_tries == len(REWARDS),
            "extra_logs": {"num_tries": self.num_tries},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """Run the episodes."""

    def __init__(self) -> None:
        super().__init__(AgentInstance)
