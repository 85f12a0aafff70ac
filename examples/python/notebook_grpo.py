"""GRPO with an engine and the formulas by themselves: cells for a notebook, or a script.

MODEL is a folder or a hub id, STEPS the number of updates.
"""

# %% A policy, and an engine that samples with it
import os

import torch

from openrlhf.algorithms.advantages import group_standardised
from openrlhf.algorithms.policy_loss import ClipRange, aggregate, ppo_loss
from openrlhf.engines.base import GenerationRequest, SamplingSettings
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tokenizer import load_tokenizer

MODEL = os.environ.get("MODEL", "Qwen/Qwen2.5-0.5B-Instruct")
STEPS = int(os.environ.get("STEPS", "10"))
PROMPTS = ["Tell me a joke.", "What is the sea?"]
GROUP_SIZE, MAX_NEW_TOKENS = 16, 16

torch.manual_seed(0)
tokenizer = load_tokenizer(MODEL)
policy = Actor(load_causal_lm(MODEL))
engine = OwnGenerate(policy.model)  # VLLMEngine of openrlhf.engines.vllm_engine has the same calls
optimizer = torch.optim.AdamW(policy.parameters(), lr=float(os.environ.get("LR", "1e-6")))


# %% The samples of every prompt, end to end
def sample() -> tuple[PackedBatch, list[str]]:
    settings = SamplingSettings(
        num_samples=GROUP_SIZE,
        max_new_tokens=MAX_NEW_TOKENS,
        stop_token_ids=(tokenizer.eos_token_id,),
    )
    prompts = [tuple(tokenizer.encode(text)) for text in PROMPTS]
    requests = [GenerationRequest(f"{k}", ids, settings) for k, ids in enumerate(prompts)]
    token_ids, is_sampled, texts = [], [], []
    for prompt, completions in zip(prompts, engine.generate(requests), strict=True):
        for completion in completions:
            ids = torch.tensor([*prompt, *completion.token_ids])
            token_ids.append(ids)
            is_sampled.append(torch.arange(len(ids)) >= len(prompt))
            texts.append(tokenizer.decode(completion.token_ids, skip_special_tokens=True))
    return PackedBatch.from_sequences(token_ids, is_sampled), texts


# %% The reward: letters of the first half of the alphabet
def reward(text: str) -> float:
    return sum(letter in "abcdefghijklm" for letter in text) / MAX_NEW_TOKENS


# %% One update a step
group_ids_B = torch.arange(len(PROMPTS)).repeat_interleave(GROUP_SIZE)
mean_rewards = []
for step in range(1, STEPS + 1):
    batch, texts = sample()
    rewards_B = torch.tensor([reward(text) for text in texts])
    advantages_B = group_standardised(rewards_B, group_ids_B)
    logprobs_N = policy(batch).logprobs
    terms = ppo_loss(
        logprobs_N,
        logprobs_N.detach(),  # the policy that sampled is this one
        advantages_N=advantages_B.repeat_interleave(batch.num_targets),
        num_actions_B=batch.num_targets,
        clip=ClipRange(),
    )
    loss = aggregate(
        terms.loss_N,
        batch.num_targets,
        mode="token_mean",
        num_tokens_global=len(logprobs_N),
        num_seqs_global=len(texts),
        max_new_tokens=MAX_NEW_TOKENS,
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean_rewards.append(rewards_B.mean().item())
    print(f"step {step}: reward {mean_rewards[-1]:.3f}")

# %% A sample of the trained policy
print(sample()[1][0])
