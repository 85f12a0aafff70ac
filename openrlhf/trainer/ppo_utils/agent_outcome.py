"""What an episode came to: its reward and segments, or the name of what went wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from openrlhf.trainer.ppo_utils.agent_engine import Episode
from openrlhf.trainer.ppo_utils.agent_trace import (
    AgentLimits,
    EpisodeRequest,
    EpisodeResult,
    EpisodeTrace,
    Failure,
    Segment,
)
from openrlhf.utils.agent_calls import AgentError, BadAnswerError, as_number, flag_of
from openrlhf.utils.user_code import in_words, user_line


def failed(request: EpisodeRequest, kind: str, message: str) -> EpisodeResult:
    """An episode without a reward."""
    return EpisodeResult(request.sample_id, failure=Failure(kind, message))


def judge(
    episode: Episode,
    acting: asyncio.Future[object],
    path: str,
    limits: AgentLimits,
    began_s: float,
    outside: Episode,
) -> EpisodeResult:
    """The result of an episode that has answered, failed or run out of time."""
    request, segments = episode.request, _segments(episode, acting, outside.trace)
    seconds = time.monotonic() - began_s
    engine_error = episode.engine_error or outside.engine_error
    if engine_error is not None:
        result = failed(request, "engine", str(engine_error))
    elif not acting.done():
        limit = f"the episode was not done after {limits.episode_timeout_s:g} s"
        result = failed(request, "episode_timeout", f"{path}: {limit}")
    elif acting.cancelled():
        result = failed(request, "exception", f"{path}: the episode was cancelled by its own code")
    elif (error := acting.exception()) is not None:
        result = failed(request, *_cause(error, path))
    elif not segments:
        result = failed(request, "no_tokens", f"{path}: the episode ended without a sampled token")
    else:
        result = _scored(episode, acting.result(), path)
    return replace(
        result,
        segments=segments if result.failure is None else (),
        num_turns=sum(segment.num_turns for segment in segments),
        is_truncated=result.is_truncated or any(segment.is_truncated for segment in segments),
        seconds=seconds,
    )


def _segments(
    episode: Episode, acting: asyncio.Future[object], outside: EpisodeTrace
) -> tuple[Segment, ...]:
    """What an episode has sampled.

    Tasks of a server that one episode started sample for all of them: an answer that names tokens
    gets exactly those, any other all that its own tasks seem to have sampled.
    """
    own = episode.trace.close()
    is_done = acting.done() and not acting.cancelled() and acting.exception() is None
    named = _named_tokens(_answer(episode, acting.result())) if is_done else None
    if named is not None and (not own or outside.num_segments):
        found = tuple(s for s in own if (s.token_ids, s.action_mask) == named)
        found = found or outside.take(lambda s: (s.token_ids, s.action_mask) == named, num_most=1)
        if found:
            return found[:1]
    return own + outside.take(lambda s: s.owner == episode.request.sample_id)


def _named_tokens(answer: object) -> tuple[list[int], list[bool]] | None:
    """The tokens and the mask of an answer's observation_tokens and action_ranges, if any."""
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


def _answer(episode: Episode, answer: object) -> object:
    """What execute returned, or put into the result queue."""
    return episode.answers[-1] if answer is None and episode.answers else answer


def _cause(error: BaseException, path: str) -> tuple[str, str]:
    where = user_line(path, error) or path
    if isinstance(error, AgentError):
        return error.kind, f"{where}: {error}"
    return "exception", f"{where}: {in_words(error)}"


def _scored(episode: Episode, answer: object, path: str) -> EpisodeResult:
    """The numbers of an answer; the failure "bad_answer" when it has none."""
    try:
        return _numbers(episode, _answer(episode, answer))
    except BadAnswerError as error:
        return failed(episode.request, error.kind, f"{path}: {error}")


def _numbers(episode: Episode, answer: object) -> EpisodeResult:
    if not isinstance(answer, Mapping):
        raise BadAnswerError(
            f"execute answered a {type(answer).__name__}. Return a dict with reward."
        )
    reward, score = _one_of(answer, "reward"), _one_of(answer, "score")
    logs = {} if answer.get("extra_logs") is None else answer["extra_logs"]
    is_cut = answer.get("truncated") is not None and flag_of(answer, "truncated")
    if not isinstance(logs, Mapping):
        raise BadAnswerError(f"extra_logs is a {type(logs).__name__}, not a dict")
    return EpisodeResult(
        episode.request.sample_id,
        reward=as_number(reward, "reward"),
        score=None if score is None else as_number(score, "scores"),
        extra_logs={
            str(name): as_number(value, f"extra_logs[{name!r}]") for name, value in logs.items()
        },
        is_truncated=is_cut,
    )


def _one_of(answer: Mapping[str, object], name: str) -> object:
    """The value under a name or its plural; both at once would be two truths."""
    given = [answer[key] for key in (name, f"{name}s") if answer.get(key) is not None]
    if len(given) > 1:
        raise BadAnswerError(f"the answer has both {name} and {name}s. Return one of them.")
    return given[0] if given else None
