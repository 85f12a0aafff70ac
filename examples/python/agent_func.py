"""The smallest agent: a guess is judged, and wrong ones get one to three more tries.

openrlhf train_ppo_ray ... --agent_func_path examples/python/agent_func.py

The executor has the older of the two shapes; agent_func_multiturn.py shows the newer one.
"""

import random
from typing import Any

import torch

from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase

RETRY = "\n\nHuman: [INCORRECT]\nPlease analyze the issues and try again.\n</s>\n\nAssistant: "


class AgentInstance(AgentInstanceBase):
    """The environment of one episode. It tosses a coin where yours looks at the answer."""

    async def __init__(self) -> None:
        self.num_steps = 0
        self.max_steps = random.randint(1, 3)

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Begin with the prompt as it is."""
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Judge `states["action_text"]`; `states["label"]` is the row's label."""
        is_done = self.num_steps >= self.max_steps
        self.num_steps += 1
        reward = torch.randint(0, 2, (1,)).float() if is_done else torch.tensor(0.0)
        return {
            "rewards": reward,  # those of all steps add up
            "scores": reward,  # 0 to 1; that of the last step counts
            "environment_feedback": "" if is_done else RETRY,
            "done": is_done,
            "sampling_params": states.get("sampling_params"),  # of the next turn
            "extra_logs": {"dummy_scores": reward},
        }


class AgentExecutor(AgentExecutorBase):
    """Runs the episodes; override `execute` to act in another way."""

    def __init__(
        self,
        max_steps: int,
        max_length: int,
        llm_engine: Any,
        hf_tokenizer: Any,
        result_queue: Any,
    ) -> None:
        super().__init__(
            AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue
        )
