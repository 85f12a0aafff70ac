"""One turn of an engine for each sample of a prompt: ask it, check what it answers, decode it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch

from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.engines.base import Completion, GenerationRequest
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
        group = self._group(prompt, asked, completions, group_id=request.group_id)
        num_tokens = sum(rollout.num_actions for rollout in group)
        request.metrics.add("num_generated_tokens", num_tokens, reduction="sum")
        return group

    def _group(
        self,
        prompt: PromptRecord,
        request: GenerationRequest,
        completions: Sequence[Completion],
        *,
        group_id: int,
    ) -> list[Rollout]:
        if len(completions) != request.sampling.num_samples:
            raise EngineError(
                f"request {request.request_id}: {len(completions)} completions, "
                f"asked for {request.sampling.num_samples}"
            )
        rollouts = [
            self._rollout(
                prompt, completion, group_id=group_id, sample_id=f"{request.request_id}/{k}"
            )
            for k, completion in enumerate(completions)
        ]
        ids = [r.token_ids[r.action_mask] for r in rollouts]
        whole, plain = (
            self.tokenizer.batch_decode(ids, skip_special_tokens=skips) for skips in (False, True)
        )
        return [
            replace(rollout, response_text=text, plain_response=words)
            for rollout, text, words in zip(rollouts, whole, plain, strict=True)
        ]

    def _rollout(
        self, prompt: PromptRecord, completion: Completion, *, group_id: int, sample_id: str
    ) -> Rollout:
        check_completion(
            sample_id, completion.token_ids, completion.logprobs, vocab_size=self.vocab_size
        )
        token_ids, action_mask = sequence_tensors(prompt.prompt_token_ids, completion.token_ids)
        return Rollout(
            sample_id=sample_id,
            group_id=group_id,
            row_id=prompt.row_id,
            token_ids=token_ids,
            action_mask=action_mask,
            logprobs=torch.tensor(completion.logprobs, dtype=torch.float32),
            weight_versions=torch.tensor(completion.token_versions, dtype=torch.int32),
            finish_reason=completion.finish_reason,
            prompt_text=prompt.prompt_text,
            response_text="",
            label=prompt.label,
            datasource=prompt.datasource,
            columns=prompt.columns,
            source_prompt=prompt.source,
        )
