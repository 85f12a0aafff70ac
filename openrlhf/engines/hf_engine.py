"""A transformers model as a rollout engine, with continuous batching.

The module may be the one that is being trained (then there is nothing to send) or a copy that
receives weights in buckets. It is used as it is: gradients are off, and its mode and its attention
come back after each call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from openrlhf.engines.base import (
    SHARED_MEMORY,
    Completion,
    GenerationRequest,
    SyncReceipt,
    WeightBucket,
    refuse_running,
)
from openrlhf.engines.hf_engine_cache import register_decode_attention
from openrlhf.engines.hf_engine_decode import DecodeBatch, Row
from openrlhf.engines.weight_transfer import BucketReader
from openrlhf.errors import EngineError, WeightSyncError
from openrlhf.utils.packable import is_padded
from openrlhf.utils.tensors import fingerprint

MAX_NUM_ROWS = 256
PREFILL_TOKENS = 8192  # padded tokens of one prefill, at most (a longer prompt goes alone)
DONE_SHARE = 8  # finished rows are taken out when they are one in eight
# Packed training attention also does ordinary masked attention; eager is there for a reason.
KEPT_ATTENTION = ("eager", "openrlhf_packed")
MAX_NAMES_SHOWN = 5


class HFEngine:
    """A RolloutEngine over a causal LM of transformers; calls from several threads take turns.

    Ranks are seeded alike: those that sample side by side give a `stream` each, and draw different
    numbers. Stream 0 takes them from torch's own generator, the others begin theirs there at every
    call, so its state is all that a checkpoint has to hold.
    """

    who = "the Hugging Face engine"
    weight_route = SHARED_MEMORY

    def __init__(
        self,
        model: Any,
        *,
        max_num_rows: int = MAX_NUM_ROWS,
        weight_version: int = 0,
        stream: int = 0,
    ) -> None:
        self.model = model
        self.stream = stream
        self.max_num_rows = max_num_rows
        self.weight_version = weight_version
        self._lock = threading.Lock()
        self._reader = BucketReader(torch.device("cpu"))
        self._received: dict[str, int] = {}
        self._is_current = True

    @classmethod
    def from_path(
        cls, path: Path | str, *, dtype: torch.dtype | str = "auto", device: str = "cpu"
    ) -> HFEngine:
        """An engine with a copy of its own, to which weights are sent."""
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        return cls(model.to(device).eval())

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_done: Callable[[int, list[Completion]], None] | None = None,
    ) -> list[list[Completion]]:
        """Sample for all requests; answers in their order. Log-probs are those before top-p.

        `on_done` is called with the position and the answer of each as soon as it is complete.
        Raises EngineError for an empty prompt, and in the middle of a weight update.
        """
        for request in requests:
            if not request.prompt_token_ids or request.sampling.max_new_tokens < 1:
                raise EngineError(
                    f"request {request.request_id} has no prompt or no room to answer"
                )
        answers: list[list[Any]] = [[None] * r.sampling.num_samples for r in requests]
        with self._lock:
            if not self._is_current:
                raise EngineError("the engine is in the middle of a weight update")
            with generating(self.model):
                for row in self._decode(requests):
                    answers[row.request][row.sample] = row.completion(self.weight_version)
                    if on_done is not None and None not in answers[row.request]:
                        on_done(row.request, answers[row.request])
        return answers

    def init_weight_transfer(self, init_info: dict[str, object]) -> None:
        """Nothing has to be agreed on beforehand."""

    def begin_weight_update(self, *, keep_running: bool = False) -> None:
        """See RolloutEngine; generating is refused until the update is finished.

        With `keep_running` a call that samples now is waited for: it ends under the weights with
        which it began.
        """
        if not keep_running:
            refuse_running(int(self._lock.locked()))
        with self._lock:
            self._is_current = False
            self._received = {}

    @torch.no_grad()
    def receive_bucket(self, bucket: WeightBucket) -> None:
        """Copy tensors into the model; raises WeightSyncError for an unknown or repeated one."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in self._reader.read(bucket):
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise WeightSyncError(f"unknown tensor {name} {tuple(tensor.shape)}")
            if name in self._received:
                raise WeightSyncError(f"tensor {name} came twice")
            parameters[name].copy_(tensor)
            self._received[name] = fingerprint(parameters[name])

    def finish_weight_update(self, weight_version: int) -> SyncReceipt:
        """Check that every parameter came and is held bit by bit; there is no cache to drop."""
        self._reader.close()
        held = dict(self.model.named_parameters())
        aliases = dict(self.model.named_parameters(remove_duplicate=False))
        arrived = {id(aliases[name]) for name in self._received}
        missing = [name for name, parameter in held.items() if id(parameter) not in arrived]
        if missing:
            raise WeightSyncError(
                f"incomplete update: missing {', '.join(missing[:MAX_NAMES_SHOWN])}"
            )
        self.weight_version = weight_version
        self._is_current = True
        return SyncReceipt(weight_version, dict(self._received), is_cache_reset=True)

    def sleep(self) -> None:
        """Nothing is held between calls but the weights."""

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Nothing to take back."""

    def shutdown(self) -> None:
        """Let go of the model."""
        self.model = None
        self._is_current = False

    def _decode(self, requests: Sequence[GenerationRequest]) -> Iterator[Row]:
        """Finished rows, as they come."""
        waiting = self._work(requests)
        batch = DecodeBatch(self.model, self._generator())
        while waiting or len(batch):
            self._admit(batch, waiting, requests)
            num_done = batch.sample()
            if num_done == len(batch) or num_done * DONE_SHARE >= len(batch):
                yield from batch.take_done()
            if len(batch):
                batch.forward()

    def _generator(self) -> torch.Generator | None:
        """Where this call's random numbers come from; None: torch's own."""
        if self.stream == 0:
            return None
        start = int(torch.randint(2**31, ())) + self.stream
        return torch.Generator(self.model.device).manual_seed(start)

    def _work(self, requests: Sequence[GenerationRequest]) -> list[list[Row]]:
        """Rows to sample, those of a prompt together; the longest prompt, taken first, is last."""
        groups = []
        for index, request in enumerate(requests):
            num_tokens = len(request.prompt_token_ids)
            rows = [
                Row(index, k, request.sampling, num_tokens)
                for k in range(request.sampling.num_samples)
            ]
            starts = range(0, len(rows), self.max_num_rows)
            groups += [rows[start : start + self.max_num_rows] for start in starts]
        return sorted(groups, key=lambda group: group[0].num_prompt_tokens)

    def _admit(
        self, batch: DecodeBatch, waiting: list[list[Row]], requests: Sequence[GenerationRequest]
    ) -> None:
        """Prefill as many waiting prompts as there is room for."""
        num_free = self.max_num_rows - len(batch)
        while waiting and len(waiting[-1]) <= num_free:
            groups = [waiting.pop()]
            num_free -= len(groups[0])
            width = groups[0][0].num_prompt_tokens
            while (
                waiting
                and len(waiting[-1]) <= num_free
                and (len(groups) + 1) * width <= PREFILL_TOKENS
            ):
                groups.append(waiting.pop())
                num_free -= len(groups[-1])
            batch.add([requests[group[0].request].prompt_token_ids for group in groups], groups)


@contextmanager
def generating(model: Any) -> Iterator[None]:
    """The model in evaluation mode, without gradients, with attention for decoding."""
    was_training = model.training
    attention = model.config._attn_implementation
    fallback = attention if attention in KEPT_ATTENTION else "sdpa"
    has_cache = not is_padded(model)
    model.eval()
    if has_cache:
        model.set_attn_implementation(register_decode_attention(fallback))
    try:
        with torch.no_grad():
            yield
    finally:
        if has_cache:
            model.set_attn_implementation(attention)
        model.train(was_training)
