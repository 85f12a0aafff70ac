"""What a reward server is sent, and the strict check of what it answers.

Beside the texts go the ids of their samples, and whether they were cut at a length limit. A server
that gives ids or the hashes of its models back, as serve_rm does, is held to them; one that knows
of neither may leave them out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from openrlhf.errors import RewardError
from openrlhf.rewards.answers import TRUNCATED_COLUMN
from openrlhf.rewards.base import RewardBatch, RewardResult, result_from_answer
from openrlhf.rewards.circuit import ServerState

MAX_TEXT_SHOWN = 200


def body_of(batch: RewardBatch) -> bytes:
    """The body of a request; raises RewardError for labels that JSON cannot hold."""
    fields: dict[str, list[object]] = {
        "query": list(batch.queries),
        "prompts": list(batch.prompts),
        "labels": list(batch.labels),
    }
    if batch.sample_ids:
        fields["ids"] = list(batch.sample_ids)
    if TRUNCATED_COLUMN in batch.columns:
        fields[TRUNCATED_COLUMN] = list(batch.columns[TRUNCATED_COLUMN])
    try:
        return json.dumps(fields).encode()
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"the labels of {batch.names()} cannot be sent to a reward server: {error}. "
            "Use a --label_key column of text, numbers or lists."
        ) from error


def result_of(status: int, content: bytes, batch: RewardBatch, server: ServerState) -> RewardResult:
    """The rewards in an answer; raises RewardError for any other."""
    url = server.url
    if status != 200:
        raise RewardError(f"{url}: answered {status} for {batch.names()}: {start_of(content)}")
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RewardError(
            f"{url}: the answer for {batch.names()} is not JSON: {start_of(content)}"
        ) from error
    if not isinstance(fields, dict):
        raise RewardError(
            f"{url}: the answer for {batch.names()} is a {type(fields).__name__}, not an object"
        )
    _check_ids(fields.get("ids"), batch, url)
    _check_models(fields.get("models"), server)
    return result_from_answer(fields, batch=batch, source=url)


def caution_of_models(servers: Sequence[ServerState]) -> str | None:
    """What to say of servers whose models differ by their hashes; None while none are known to."""
    known = [server for server in servers if server.models]
    for other in known[1:]:
        if _hashes(other) != _hashes(known[0]):
            return (
                f"reward servers serve different models: {known[0].url} {_shown(known[0].models)}, "
                f"{other.url} {_shown(other.models)}. Samples go to either of them, and rewards of "
                "two models are not comparable within a group; serve one model at all addresses."
            )
    return None


def start_of(content: bytes) -> str:
    """The first words of an answer, for a message."""
    text = content[:MAX_TEXT_SHOWN].decode(errors="replace")
    return " ".join(text.split()) or "an empty body"


def _check_ids(ids: object, batch: RewardBatch, url: str) -> None:
    """Refuse the answer to another request, or one in another order."""
    if ids is None or not batch.sample_ids:
        return
    if not isinstance(ids, list) or len(ids) != len(batch):
        raise RewardError(f"{url}: the answer's ids are not one for each of {batch.names()}")
    for asked, found in zip(batch.sample_ids, ids, strict=True):
        if found != asked:
            raise RewardError(
                f"{url}: the answer is for sample {found!r:.{MAX_TEXT_SHOWN}}, where {asked} was "
                "asked for. Give ids back as they came, in the order of the rewards."
            )


def _check_models(models: object, server: ServerState) -> None:
    """Refuse rewards of a model that took another's place during the run."""
    if not isinstance(models, dict) or not models:
        return
    if not all(isinstance(hashed, str) for hashed in models.values()):  # something of its own
        return
    if server.models is None:
        server.models = models
    if models != server.models:
        raise RewardError(
            f"{server.url}: another reward model answers now: {_shown(models)}, before it was "
            f"{_shown(server.models)}. Serve that one again, or end this run and begin another: "
            "rewards of two models are not comparable."
        )


def _hashes(server: ServerState) -> list[str]:
    return sorted(map(str, (server.models or {}).values()))  # names are those of folders


def _shown(models: dict[str, object] | None) -> str:
    models = models or {}
    text = ", ".join(f"{name} ({hashed})" for name, hashed in models.items())
    return text[:MAX_TEXT_SHOWN]
