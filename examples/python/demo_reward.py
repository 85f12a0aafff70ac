"""The reward of `make demo`: 1 for exactly the right number and nothing else, 0 otherwise."""

import torch

END = "<|end|>"


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, object]:
    """Compare what follows each prompt with its label; answers tensors of shape (B,)."""
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    answers = [response.removesuffix(END).strip() for response in responses]
    is_right = [answer == label for answer, label in zip(answers, labels, strict=True)]
    rewards = torch.tensor(is_right, dtype=torch.float32)
    return {"rewards": rewards, "scores": rewards}
