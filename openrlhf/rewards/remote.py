"""Rewards from HTTP servers: POST {query, prompts, labels, ids}, answered by {rewards, scores?,
extra_logs?, ids?, models?}.

Every batch is answered exactly once, by one of the servers, or ends in a RewardError. Tries are
repeated after 5xx answers and broken connections only, at another server first.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from openrlhf.config.serving import is_loopback
from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.base import (
    TRUNCATED_COLUMN,
    RewardBatch,
    RewardResult,
    RewardSource,
    checked_result,
)

TOKEN_VARIABLE = "OPENRLHF_REWARD_TOKEN"  # sent as a bearer token where it is set
MAX_TEXT_SHOWN = 200


@dataclass(frozen=True)
class RemoteSettings:
    """Sizes and limits of the client."""

    batch_size: int = 8  # most samples in a request
    timeout_s: float = 300.0  # for all tries of a request
    try_timeout_s: float = 60.0
    num_tries: int = 3  # of a request at each server
    max_in_flight: int = 64  # requests for each server
    backoff_s: float = 0.5  # before the second round of tries; doubles with each
    rest_s: float = 10.0  # for which a server that failed is asked last


@dataclass(eq=False)
class Server:
    """What the client knows of one server."""

    url: str
    num_in_flight: int = 0
    rests_until_s: float = 0.0  # on the monotonic clock
    models: dict[str, object] | None = None  # name to hash, as its first answer had them


class RemoteReward(RewardSource):
    """Scores batches at one or several servers, over pooled connections."""

    def __init__(self, urls: str, settings: RemoteSettings | None = None) -> None:
        """`urls` with commas between; raises ConfigError for one that is none."""
        self.settings = settings or RemoteSettings()
        self._servers = [Server(url) for url in check_urls(urls)]
        super().__init__(" ".join(s.url for s in self._servers), self.settings.batch_size)
        hosts = [urlsplit(server.url).hostname or "" for server in self._servers]
        most = self.settings.max_in_flight * len(hosts)
        token = os.environ.get(TOKEN_VARIABLE)
        self._places = asyncio.Semaphore(most)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            timeout=None,
            # No proxy comes between this machine and itself.
            mounts={f"all://{host}": None for host in hosts if is_loopback(host)},
        )

    async def score_part(self, batch: RewardBatch) -> RewardResult:
        body = body_of(batch)
        headers = {"Content-Type": "application/json", "X-Request-Id": uuid.uuid4().hex}
        async with self._places:  # the time limit begins when it is this request's turn
            server, answer = await self._tries(batch, body, headers)
        return result_of(answer, batch, server)

    async def release(self) -> None:
        await self._client.aclose()

    async def _tries(
        self, batch: RewardBatch, body: bytes, headers: dict[str, str]
    ) -> tuple[Server, httpx.Response]:
        """Try until an answer, or the end of tries or time."""
        start_s, limit_s = time.monotonic(), self.settings.timeout_s
        counts = dict.fromkeys(self._servers, 0)
        problem = ""
        for number in range(self.settings.num_tries * len(counts)):
            round_number, place = divmod(number, len(counts))
            if place == 0 and round_number:  # all have failed; jitter keeps requests apart
                longest_s = self.settings.backoff_s * 2 ** (round_number - 1)
                await asyncio.sleep(random.uniform(0.5, 1.0) * longest_s)
            left_s = limit_s - (time.monotonic() - start_s)
            if left_s <= 0:
                break
            server = self._next_server(counts)
            counts[server] += 1
            answer = await self._try(server, body, headers, left_s)
            if isinstance(answer, httpx.Response):
                return server, answer
            problem = f"{server.url}: {answer}"
            server.rests_until_s = time.monotonic() + self.settings.rest_s
        seconds = time.monotonic() - start_s
        raise RewardError(
            f"{self.name}: no rewards for {batch.names()} after {sum(counts.values())} tries in "
            f"{seconds:.1f} s (--reward_timeout_s {limit_s:g}): {problem}"
        )

    def _next_server(self, counts: dict[Server, int]) -> Server:
        """Return the server with the fewest tries of a request, one that rests last."""
        now_s = time.monotonic()
        return min(counts, key=lambda s: (counts[s], s.rests_until_s > now_s, s.num_in_flight))

    async def _try(
        self, server: Server, body: bytes, headers: dict[str, str], left_s: float
    ) -> httpx.Response | str:
        """Return the response, or what happened where another try may go better."""
        timeout_s = min(self.settings.try_timeout_s, left_s)
        request = self._client.post(server.url, content=body, headers=headers)
        server.num_in_flight += 1
        try:
            answer = await asyncio.wait_for(request, timeout_s)
        except asyncio.TimeoutError:
            return f"no answer in {timeout_s:.1f} s"
        except httpx.RequestError as error:
            return f"{type(error).__name__} {error}".strip()
        finally:
            server.num_in_flight -= 1
        if answer.status_code >= 500:
            return f"answered {answer.status_code}: {start_of(answer.content)}"
        server.rests_until_s = 0.0
        return answer


def check_urls(spec: str) -> list[str]:
    """Return the URLs of a comma list; raises ConfigError for one that no server can have."""
    urls = [url.strip() for url in spec.split(",") if url.strip()]
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--remote_rm_url is neither one .py file nor a list of URLs: {url}. "
                "Type http://host:port/get_reward, several with commas between."
            )
    return urls


def body_of(batch: RewardBatch) -> bytes:
    """Return the body of a request; raises RewardError for labels that JSON cannot hold."""
    fields: dict[str, Sequence[object]] = {
        "query": batch.queries,
        "prompts": batch.prompts,
        "labels": batch.labels,
    }
    if batch.sample_ids:
        fields["ids"] = batch.sample_ids
    if TRUNCATED_COLUMN in batch.columns:
        fields[TRUNCATED_COLUMN] = batch.columns[TRUNCATED_COLUMN]
    try:
        return json.dumps({name: list(values) for name, values in fields.items()}).encode()
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"the labels of {batch.names()} cannot be sent to a reward server: {error}. "
            "Use a --label_key column of text, numbers or lists."
        ) from error


def result_of(answer: httpx.Response, batch: RewardBatch, server: Server) -> RewardResult:
    """Return the rewards in an answer; raises RewardError for any other."""
    url, content, names = server.url, answer.content, batch.names()
    if answer.status_code != 200:
        status = answer.status_code
        raise RewardError(f"{url}: answered {status} for {names}: {start_of(content)}")
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise RewardError(
            f"{url}: the answer for {names} is not a JSON object: {start_of(content)}"
        )
    ids = fields.get("ids")
    if ids is not None and batch.sample_ids and ids != list(batch.sample_ids):
        raise RewardError(
            f"{url}: the answer has the ids {ids!r:.{MAX_TEXT_SHOWN}}, where {names} were asked "
            "for. Give ids back as they came, in the order of the rewards."
        )
    _check_models(fields.get("models"), server)
    return checked_result(fields, batch=batch, source=url)


def start_of(content: bytes) -> str:
    """Return the first words of an answer, for a message."""
    text = content[:MAX_TEXT_SHOWN].decode(errors="replace")
    return " ".join(text.split()) or "an empty body"


def _check_models(models: object, server: Server) -> None:
    """Refuse rewards of a model that took another's place during the run."""
    if not isinstance(models, dict) or not models:
        return
    server.models = server.models or models
    if models != server.models:
        raise RewardError(
            f"{server.url}: another reward model answers now: {models!s:.{MAX_TEXT_SHOWN}}, before "
            f"it was {server.models!s:.{MAX_TEXT_SHOWN}}. Serve that one again, or end this run "
            "and begin another: rewards of two models are not comparable."
        )
