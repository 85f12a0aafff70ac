"""Interface of rollout engines: token ids in, sampled ids and log-probs out, and weight updates.

Every engine (vLLM, Hugging Face, fakes in tests) has these calls; nothing above this layer
knows which one it has.
"""

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from openrlhf.errors import LostEngineError, LostRankError
from openrlhf.utils.images import Picture

Result = TypeVar("Result")

SEED_BITS = 63


def named_seed(seed: int, name: object) -> int:
    """Return the seed of a part, with room for the samples of a request. All its bits differ from
    those of other seeds and names: torch's generator reads 32 of them on a CPU.
    """
    return random.Random(f"{seed} {name}").getrandbits(SEED_BITS - 1)


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings; `temperature` 0 is greedy. Tokens are dropped by `min_p`, then `top_k`,
    then `top_p`.

    Example: `SamplingSettings(num_samples=8, temperature=0.7, stop_token_ids=(151645,))`
    """

    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()  # every id that ends a response (all EOS ids)
    seed: int | None = None
    repetition_penalty: float = 1.0  # above 1: tokens of prompt and response are less likely
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0  # of the likeliest token's probability
    stop: tuple[str, ...] = ()  # texts that end a response, after the token that completes one

    def stopping_at(
        self, texts: Sequence[str] | None, token_ids: Sequence[int] | None
    ) -> "SamplingSettings":
        """Return the settings with these further ends of a response."""
        ids = tuple(dict.fromkeys([*self.stop_token_ids, *(token_ids or ())]))
        return replace(self, stop=(*self.stop, *(texts or ())), stop_token_ids=ids)

    def for_part(self, name: object) -> "SamplingSettings":
        """Return the settings of a part of what has these: a prompt of many, or a turn of a sample.
        With a seed, every part has one of its own; sample k of a prompt takes it plus k.
        """
        return self if self.seed is None else replace(self, seed=named_seed(self.seed, name))

    def for_sample(self, k: int) -> "SamplingSettings":
        """Return the settings of sample k of a prompt by itself."""
        return replace(self, num_samples=1, seed=None if self.seed is None else self.seed + k)


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, of which `sampling.num_samples` completions are wanted.

    Example: `GenerationRequest("step3/17", (1, 42, 7), SamplingSettings(num_samples=8))`
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]  # with a placeholder for every token of an image
    sampling: SamplingSettings
    images: tuple[Picture, ...] = ()  # of the prompt, in order
    tag: str = ""  # of this request alone, where its engine reports on it; names come again


@dataclass(frozen=True)
class Completion:
    """A sampled response with its stop token; log-probs as the engine used them.

    Example: `Completion((5, 9, 2), (-0.1, -1.2, -0.01), "stop", weight_version=3)`
    """

    token_ids: tuple[int, ...]  # A ids
    logprobs: tuple[float, ...]  # A log-probs at the sampling temperature, before top-k and top-p
    finish_reason: str  # "stop" or "length"; empty for a beginning
    weight_version: int  # weights that sampled the last token
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

    def followed_by(self, rest: "Completion") -> "Completion":
        """Return the response that begins with this one and ends with `rest`."""
        if not rest.token_ids:
            return replace(self, finish_reason=rest.finish_reason)
        starts = [*(self.version_starts or ((0, self.weight_version),))]
        for start, version in rest.version_starts or ((0, rest.weight_version),):
            if version != starts[-1][1]:
                starts.append((len(self.token_ids) + start, version))
        return Completion(
            self.token_ids + rest.token_ids,
            self.logprobs + rest.logprobs,
            rest.finish_reason,
            rest.weight_version,
            tuple(starts) if len(starts) > 1 else (),
        )


@dataclass(frozen=True)
class Beginning:
    """Tokens of a response whose request is not finished, which another engine may go on from.

    Example: `Beginning("1.17", 2, 128, ids_A, logprobs_A, ((0, 3),))`, of which 128 tokens came
    before
    """

    tag: str  # of the request
    sample: int
    start: int  # tokens of the response before these
    token_ids: "array[int]"  # A ids
    logprobs: "array[float]"  # A log-probs, in 32 bits as the engine has them
    version_starts: tuple[tuple[int, int], ...]  # of the response so far, as those of a Completion
    finish_reason: str = ""  # of a sample that is finished before others of its request

    @staticmethod
    def joined(parts: "Sequence[Beginning]") -> Completion:
        """Return the response so far, of parts that lie end to end."""
        starts = parts[-1].version_starts or ((0, 0),)
        return Completion(
            tuple(token_id for part in parts for token_id in part.token_ids),
            tuple(logprob for part in parts for logprob in part.logprobs),
            parts[-1].finish_reason,
            starts[-1][1],
            starts if len(starts) > 1 else (),
        )


@dataclass(frozen=True)
class WeightBucket:
    """Some named full tensors in one flat byte buffer, however it travels.

    Example: `WeightBucket(("lm_head.weight",), ("bfloat16",), ((100, 8),), (0,), 1600, address)`
    """

    names: tuple[str, ...]  # Hugging Face parameter names
    dtypes: tuple[str, ...]  # "float32", "bfloat16", ...
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]  # byte offset of each tensor
    num_bytes: int
    # Where the bytes are: {node or GPU: handle}, {} when broadcast, {"object": reference} in Ray's
    # store, {"bytes": array} once they were fetched from there.
    address: dict[str, Any]


class RolloutEngine(Protocol):
    """An engine that samples and takes weights: VLLMEngine here, or one in another process."""

    # While it is not up: the rank that has to start again before it can have weights.
    waits_for: LostRankError | None

    @property
    def who(self) -> str:
        """Return the name of the engine, as errors print it."""

    @property
    def is_up(self) -> bool:
        """Return False while a new engine is started in its place; raise if none could be."""

    def lose(self, why: LostEngineError) -> None:
        """Start a new engine in its place; raise the error where that cannot be."""

    async def sample(self, request: GenerationRequest) -> list[Completion]:
        """Return the completions of a request; raises EngineError.

        Cancelling it stops the sampling, and ends when the engine has stopped.
        """

    def call(self, method: Callable[..., Result], *args: object) -> Result:
        """Run a method of VLLMEngine and wait for its result."""
