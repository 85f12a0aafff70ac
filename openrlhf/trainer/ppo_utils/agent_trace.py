"""What was sampled in an episode, token by token: the trace that rollouts are made of.

A literal example: prompt [7, 8] sampled [9, 2], then prompt [7, 8, 9, 2, 5] sampled [4] is one
segment, tokens [7, 8, 9, 2, 5, 4] with mask [F, F, T, T, F, T]. A prompt that does not begin with
a segment's tokens (a template that rewrites history, a branch) begins a segment of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from openrlhf.engines.base import Completion, SamplingSettings
from openrlhf.utils.agent_calls import AgentError
from openrlhf.utils.rollout import check_completion


class EpisodeOverError(AgentError):
    """A turn was asked for after the episode had ended."""


@dataclass(frozen=True)
class AgentLimits:
    """How long and how many; every wait of an episode has its deadline here."""

    max_length: int  # tokens of an episode: prompt, turns and feedback
    num_tasks: int = 128  # episodes that an engine runs at once
    max_steps: int = 10_000  # turns of an episode
    step_timeout_s: float = 300.0  # of one call of the environment
    episode_timeout_s: float = 3600.0  # of all turns together, generation included


@dataclass(frozen=True)
class EpisodeRequest:
    """One sample of one prompt, to be acted out."""

    sample_id: str
    prompt_text: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingSettings
    label: object = ""
    columns: dict[str, object] = field(default_factory=dict)


@dataclass
class Segment:
    """A run of tokens the policy went through without a break; T tokens, A of them sampled."""

    token_ids: list[int]  # T
    action_mask: list[bool]  # T
    num_prompt_tokens: int  # before the first sampled one
    logprobs: list[float] = field(default_factory=list)  # A
    weight_versions: list[int] = field(default_factory=list)  # A
    num_turns: int = 0
    is_truncated: bool = False
    owner: str | None = None  # the episode whose tasks seem to have sampled it

    def extend(self, prompt_token_ids: Sequence[int], completion: Completion) -> None:
        """Append what stands between the last turn and this one, and this turn."""
        between = prompt_token_ids[len(self.token_ids) :]
        self.token_ids += [*between, *completion.token_ids]
        self.action_mask += [False] * len(between) + [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.weight_versions += completion.token_versions
        self.num_turns += 1


@dataclass(frozen=True)
class Failure:
    """Why an episode has no reward: a name that is counted, and a line for a person."""

    kind: str  # exception, step_timeout, episode_timeout, blocked, bad_answer, no_tokens, engine, …
    message: str


@dataclass(frozen=True)
class EpisodeResult:
    """How an episode ended: with a reward, or with a failure."""

    sample_id: str
    segments: tuple[Segment, ...] = ()
    reward: float | None = None
    score: float | None = None
    extra_logs: dict[str, float] = field(default_factory=dict)
    is_truncated: bool = False
    num_turns: int = 0
    seconds: float = 0.0
    failure: Failure | None = None


class EpisodeTrace:
    """Takes down every turn of an episode; turns may come from several threads."""

    def __init__(self, sample_id: str, *, vocab_size: int) -> None:
        self.sample_id = sample_id
        self.vocab_size = vocab_size
        self._segments: list[Segment] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def record(
        self,
        prompt_token_ids: Sequence[int],
        completion: Completion,
        *,
        fills_context: bool = True,
        owner: str | None = None,
    ) -> None:
        """Note a turn; EngineError for an impossible one, EpisodeOverError after the end.

        `fills_context`: the turn had all the room there was, so that cutting it cut the episode.
        """
        check_completion(
            self.sample_id, completion.token_ids, completion.logprobs, vocab_size=self.vocab_size
        )
        prompt = list(prompt_token_ids)
        with self._lock:
            self._check_open()
            segment = self._segment_of(prompt)
            segment.extend(prompt, completion)
            segment.owner = owner
            segment.is_truncated |= fills_context and completion.finish_reason == "length"

    @property
    def num_segments(self) -> int:
        """How many there are now."""
        with self._lock:
            return len(self._segments)

    @property
    def is_truncated(self) -> bool:
        """Whether a turn was cut where the context was full."""
        with self._lock:
            return any(segment.is_truncated for segment in self._segments)

    @property
    def is_closed(self) -> bool:
        """Whether the episode has ended."""
        with self._lock:
            return self._is_closed

    def check_open(self) -> None:
        """Raise EpisodeOverError when the episode has ended."""
        with self._lock:
            self._check_open()

    def known_ids(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The head of a prompt, as far as it is what an earlier turn had and sampled."""
        prompt = list(prompt_token_ids)
        with self._lock:
            return max((s.token_ids.copy() for s in self._begun(prompt)), key=len, default=[])

    def take(
        self, is_wanted: Callable[[Segment], bool], num_most: int | None = None
    ) -> tuple[Segment, ...]:
        """Hand out segments, which are not of this trace any more."""
        with self._lock:
            taken = tuple(islice(filter(is_wanted, self._segments), num_most))
            self._segments = [s for s in self._segments if not any(s is t for t in taken)]
        return taken

    def close(self) -> tuple[Segment, ...]:
        """End the episode; what comes later is refused."""
        with self._lock:
            self._is_closed = True
            return tuple(self._segments)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EpisodeOverError(f"episode {self.sample_id} has ended")

    def _begun(self, prompt: list[int]) -> list[Segment]:
        return [s for s in self._segments if prompt[: len(s.token_ids)] == s.token_ids]

    def _segment_of(self, prompt: list[int]) -> Segment:
        """The longest segment that the prompt goes on from, else a new one."""
        begun = self._begun(prompt)
        if begun:
            return max(begun, key=lambda segment: len(segment.token_ids))
        segment = Segment(prompt.copy(), [False] * len(prompt), len(prompt))
        self._segments.append(segment)
        return segment
