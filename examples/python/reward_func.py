"""The smallest reward function: longer words score higher. Start here and put your own rule in.

openrlhf train_ppo_ray ... --remote_rm_url examples/python/reward_func.py
"""


def reward_func(queries: list[str], prompts: list[str], labels: list[object]) -> dict[str, object]:
    """One reward per sample; `queries` are prompt and response in one text.

    `scores` (0 to 1, optional) feed the dynamic filter and pass@k, `extra_logs` (optional) are
    logged as means.
    """
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    lengths = [_mean_word_length(response) for response in responses]
    scores = [min(length / 10, 1.0) for length in lengths]
    return {"rewards": scores, "scores": scores, "extra_logs": {"mean_word_length": lengths}}


def _mean_word_length(text: str) -> float:
    words = text.split()
    return sum(map(len, words)) / len(words) if words else 0.0
