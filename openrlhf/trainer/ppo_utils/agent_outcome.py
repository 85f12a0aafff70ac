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
    Failure,
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
) -> EpisodeResult:
    """The result of an episode that has answered, failed or run out of time."""
    request, segments = episode.request, episode.trace.close()
    seconds = time.monotonic() - began_s
    if episode.engine_error is not None:
        result = failed(request, "engine", str(episode.engine_error))
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
        num_turns=episode.trace.num_turns,
        seconds=seconds,
    )


def _cause(error: BaseException, path: str) -> tuple[str, str]:
    where = user_line(path, error) or path
    if isinstance(error, AgentError):
        return error.kind, f"{where}: {error}"
    return "exception", f"{where}: {in_words(error)}"


def _scored(episode: Episode, answer: object, path: str) -> EpisodeResult:
    """The numbers of an answer; the failure "bad_answer" when it has none."""
    if answer is None and episode.answers:
        answer = episode.answers[-1]
    try:
        return _numbers(episode, answer)
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
        is_truncated=is_cut or episode.trace.is_truncated,
    )


def _one_of(answer: Mapping[str, object], name: str) -> object:
    """The value under a name or its plural; both at once would be two truths."""
    given = [answer[key] for key in (name, f"{name}s") if answer.get(key) is not None]
    if len(given) > 1:
        raise BadAnswerError(f"the answer has both {name} and {name}s. Return one of them.")
    return given[0] if given else None
