"""One episode: what is asked for, what was sampled in it token by token, and its result.

A literal example: prompt [7, 8] sampled [9, 2], then prompt [7, 8, 9, 2, 5] sampled [4] is one
segment, tokens [7, 8, 9, 2, 5, 4] with mask [F, F, T, T, F, T]. A prompt that does not begin with
a segment's tokens (a template that rewrites history, a branch) begins a segment of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.errors import EngineError
from openrlhf.utils.agent import AgentError, BadAnswerError, as_number, flag_of
from openrlhf.utils.rollout import check_completion
from openrlhf.utils.tokenizer import Tokenizer


@dataclass(frozen=True)
class AgentSetup:
    """What a worker is told before its first episode; every wait has its deadline here."""

    path: str  # of the agent file
    tokenizer: Tokenizer
    vocab_size: int
    max_length: int  # tokens of an episode: prompt, turns and feedback
    num_tasks: int = 128  # episodes that a worker runs at once
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

    def extend(self, prompt_token_ids: Sequence[int], completion: Completion) -> None:
        """Append what stands between the last turn and this one, and this turn."""
        between = prompt_token_ids[len(self.token_ids) :]
        self.token_ids += [*between, *completion.token_ids]
        self.action_mask += [False] * len(between) + [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.weight_versions += completion.token_versions
        self.num_turns += 1


@dataclass(frozen=True)
class EpisodeResult:
    """How an episode ended that has a reward."""

    segments: tuple[Segment, ...]
    reward: float
    score: float | None = None
    extra_logs: dict[str, float] = field(default_factory=dict)
    is_truncated: bool = False
    seconds: float = 0.0

    @property
    def num_turns(self) -> int:
        """Return the number of sampled turns."""
        return sum(segment.num_turns for segment in self.segments)


class Episode:
    """Records every turn of a running episode; turns may come from several threads."""

    def __init__(
        self,
        request: EpisodeRequest,
        setup: AgentSetup,
        ask: Callable[[str, GenerationRequest], Future[Completion]],
    ) -> None:
        """`ask` sends an episode's request to the engine; cancelling its future stops it."""
        self.request = request
        self.setup = setup
        self.ask = ask
        self.segments: list[Segment] = []
        self.answers: list[object] = []  # put into the result queue
        self.engine_error: EngineError | None = None  # ends the run, whatever user code makes of it
        self.sessions: list[object] = []  # of clients; they live as long as the episode
        self.num_requests = 0
        self.is_closed = False
        self._lock = threading.Lock()

    def record(
        self,
        prompt_token_ids: Sequence[int],
        completion: Completion,
        *,
        fills_context: bool = True,
    ) -> None:
        """Note a turn; EngineError for an impossible one, AgentError after the end.

        `fills_context`: the turn had all the room there was, so that cutting it cut the episode.
        """
        ids, logprobs = completion.token_ids, completion.logprobs
        check_completion(self.request.sample_id, ids, logprobs, vocab_size=self.setup.vocab_size)
        prompt = list(prompt_token_ids)
        with self._lock:
            self.check_open()
            begun = [s for s in self.segments if prompt[: len(s.token_ids)] == s.token_ids]
            if not begun:
                begun = [Segment(prompt.copy(), [False] * len(prompt), len(prompt))]
                self.segments += begun
            segment = max(begun, key=lambda segment: len(segment.token_ids))
            segment.extend(prompt, completion)
            segment.is_truncated |= fills_context and completion.finish_reason == "length"

    def check_open(self) -> None:
        """Raise AgentError when the episode has ended."""
        if self.is_closed:
            raise AgentError(f"episode {self.request.sample_id} has ended", "episode_over")

    def close(self) -> None:
        """End the episode: refuse later turns."""
        with self._lock:
            self.is_closed = True


def result_of(episode: Episode, answer: object, outside: Episode) -> EpisodeResult:
    """Return the result of a closed episode whose `execute` returned `answer`; raises AgentError.

    `outside` recorded the turns that belong to no episode by their task.
    """
    path = episode.setup.path
    if answer is None and episode.answers:
        answer = episode.answers[-1]
    segments = take_segments(episode, answer, outside)
    if not segments:
        message = f"{path}: the episode ended without a sampled token"
        raise AgentError(message, "no_tokens")
    try:
        return scored(segments, answer)
    except BadAnswerError as error:
        raise BadAnswerError(f"{path}: {error}") from error


def take_segments(episode: Episode, answer: object, outside: Episode) -> tuple[Segment, ...]:
    """Return what an episode has sampled.

    Tasks of a server sample for all episodes: an answer that names tokens gets exactly those, any
    other all that its own tasks have sampled.
    """
    named = named_tokens(answer)
    own, shared = episode.segments, outside.segments
    if named is not None and (not own or shared):
        for segment in [*own, *shared]:
            if (segment.token_ids, segment.action_mask) == named:
                outside.segments = [s for s in shared if s is not segment]
                return (segment,)
    return tuple(own)


def named_tokens(answer: object) -> tuple[list[int], list[bool]] | None:
    """Return tokens and mask of an answer's observation_tokens and action_ranges, if any."""
    ids = answer.get("observation_tokens") if isinstance(answer, Mapping) else None
    if not isinstance(ids, (list, tuple)):
        return None
    try:
        ranges = list(answer["action_ranges"])  # type: ignore[index]
        mask = [False] * ranges[-1][1]
        for start, stop in ranges:
            mask[start:stop] = [True] * (stop - start)
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return list(ids[: len(mask)]), mask


def scored(segments: tuple[Segment, ...], answer: object) -> EpisodeResult:
    """Return the result of an answer; raises BadAnswerError when it has no reward."""
    if not isinstance(answer, Mapping):
        raise BadAnswerError(
            f"execute answered a {type(answer).__name__}. Return a dict with reward."
        )
    score = one_of(answer, "score")
    logs = {} if answer.get("extra_logs") is None else answer["extra_logs"]
    is_cut = answer.get("truncated") is not None and flag_of(answer, "truncated")
    if not isinstance(logs, Mapping):
        raise BadAnswerError(f"extra_logs is a {type(logs).__name__}, not a dict")
    return EpisodeResult(
        segments,
        reward=as_number(one_of(answer, "reward"), "reward"),
        score=None if score is None else as_number(score, "scores"),
        extra_logs={
            str(name): as_number(value, f"extra_logs[{name!r}]") for name, value in logs.items()
        },
        is_truncated=is_cut or any(segment.is_truncated for segment in segments),
    )


def one_of(answer: Mapping[str, object], name: str) -> object:
    """Return the value under a name or its plural; raises BadAnswerError when both are given."""
    given = [answer[key] for key in (name, f"{name}s") if answer.get(key) is not None]
    if len(given) > 1:
        raise BadAnswerError(f"the answer has both {name} and {name}s. Return one of them.")
    return given[0] if given else None
