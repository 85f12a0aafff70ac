"""What a rollout engine is: token ids in, sampled ids and log-probs out, weights replaced between.

Every engine (vLLM, Hugging Face, fakes in tests) answers these calls; nothing above this layer
knows which one it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class SamplingSettings:
    """How to sample; `temperature` 0 is greedy."""

    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()  # every id that ends a response (all EOS ids)
    seed: int | None = None
    repetition_penalty: float = 1.0  # above 1: tokens of prompt and response are less likely


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt; answered by `sampling.num_samples` completions."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingSettings


@dataclass(frozen=True)
class Completion:
    """What was sampled after a prompt, with the stop token; log-probs as the engine used them."""

    token_ids: tuple[int, ...]  # A ids
    logprobs: tuple[float, ...]  # A log-probs at the sampling temperature, before top-p
    finish_reason: str  # "stop" or "length"
    weight_version: int  # of the last token
    # (index of the first token, version), where weights changed while it was sampled; else empty
    version_starts: tuple[tuple[int, int], ...] = ()

    @property
    def token_versions(self) -> tuple[int, ...]:
        """Return the version of the weights each token was sampled under, A versions."""
        if not self.version_starts:
            return (self.weight_version,) * len(self.token_ids)
        ends = [start for start, _ in self.version_starts[1:]] + [len(self.token_ids)]
        spans = zip(self.version_starts, ends, strict=True)
        return tuple(version for (start, version), end in spans for _ in range(start, end))


@dataclass(frozen=True)
class WeightBucket:
    """Some named full tensors in one flat byte buffer, however it travels."""

    names: tuple[str, ...]  # Hugging Face parameter names
    dtypes: tuple[str, ...]  # "float32", "bfloat16", ...
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]  # byte offset of each tensor
    num_bytes: int
    # {place: handle} for a node or GPU, {} when broadcast, {"object": reference} in Ray's store,
    # {"bytes": array} once it was fetched from there
    handle: dict[str, Any]


class RolloutEngine(Protocol):
    """The calls of every engine that samples and takes weights."""

    @property
    def who(self) -> str:
        """Return the engine in the words of an error."""

    async def sample(self, request: GenerationRequest) -> list[Completion]:
        """Return the completions of a request; raises EngineError.

        Cancelling it stops the sampling, and ends when the engine has stopped.
        """

    def init_weight_transfer(self, init_info: dict[str, object]) -> None:
        """Join the trainer's group, once before the first broadcast."""

    def begin_weight_update(self, *, keep_running: bool = False) -> None:
        """Stop sampling and get ready to receive buckets.

        Requests that run are refused with a WeightSyncError, so that no sample is of two policies
        by accident. With `keep_running` they are held between two tokens, and go on under the new
        weights; every token carries the version it was sampled under (`version_starts`).
        """

    def receive_bucket(self, bucket: WeightBucket) -> None:
        """Load the tensors of one bucket."""

    def finish_weight_update(self, weight_version: int) -> dict[str, int]:
        """Make the new weights live and drop the prefix cache; return the fingerprints of the
        tensors that came, by Hugging Face parameter name.
        """

    def sleep(self) -> None:
        """Give device memory back (weights and cache); weights must be sent before it samples."""

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take device memory again; tags "weights" or "kv_cache" for a part of it."""

    def shutdown(self) -> None:
        """Free everything; the engine answers no further call."""


NamedTensors = Iterable[tuple[str, Tensor]]
