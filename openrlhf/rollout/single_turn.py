"""One turn of an engine for each sample of a prompt: ask it, check what it answers, decode it."""

from __future__ import annotations

import copy

import torch

from openrlhf.engines.base import GenerationRequest
from openrlhf.errors import EngineError
from openrlhf.rollout.engine_pool import EnginePool
from openrlhf.rollout.rollout import RolloutRequest
from openrlhf.utils.rollout import Rollout, check_completion, sequence_tensors
from openrlhf.utils.tokenizer import Tokenizer


class SingleTurn:
    """Makes the samples of a prompt on the engine with the least to do."""

    def __init__(self, pool: EnginePool, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self.pool = pool
        self.in_rounds = pool.in_rounds
        self.describe = pool.describe
        # Tokenizers are not shared between threads.
        self.tokenizer = copy.deepcopy(tokenizer)
        self.vocab_size = vocab_size

    async def act(self, request: RolloutRequest) -> list[Rollout]:
        """Return the samples of a prompt, with their texts; raises EngineError."""
        prompt = request.prompt
        asked = GenerationRequest(request.name, prompt.prompt_token_ids, request.sampling)
        completions = await self.pool.generate(asked)
        if len(completions) != asked.sampling.num_samples:
            raise EngineError(
                f"request {asked.request_id}: {len(completions)} completions, "
                f"asked for {asked.sampling.num_samples}"
            )
        ids = [list(completion.token_ids) for completion in completions]
        names = [f"{asked.request_id}/{k}" for k in range(len(ids))]
        for name, completion in zip(names, completions, strict=True):
            check_completion(
                name, completion.token_ids, completion.logprobs, vocab_size=self.vocab_size
            )
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=False)
        plain = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        request.metrics.add("num_generated_tokens", sum(map(len, ids)), reduction="sum")
        group = []
        for k, completion in enumerate(completions):
            token_ids, action_mask = sequence_tensors(prompt.prompt_token_ids, ids[k])
            rollout = Rollout(
                sample_id=names[k],
                group_id=request.group_id,
                row_id=prompt.row_id,
                token_ids=token_ids,
                action_mask=action_mask,
                logprobs=torch.tensor(completion.logprobs, dtype=torch.float32),
                weight_versions=torch.tensor(completion.token_versions, dtype=torch.int32),
                finish_reason=completion.finish_reason,
                prompt_text=prompt.prompt_text,
                response_text=texts[k],
                plain_response=plain[k],
                label=prompt.label,
                datasource=prompt.datasource,
                columns=prompt.columns,
                source_prompt=prompt.source,
            )
            group.append(rollout)
        return group
