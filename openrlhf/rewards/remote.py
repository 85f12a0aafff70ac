"""Rewards from HTTP servers: POST {query, prompts, labels, ids} returns {rewards, scores?,
extra_logs?, ids?, models?}.

Every batch is scored exactly once, by one of the servers, or ends in a RewardError. Tries are
repeated after 5xx responses and broken connections only, at another server first.
"""

import asyncio
import json
import os
import random
import time
import uuid
from contextlib import suppress
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
NUM_TRIES = 3  # of a request at each server
MAX_IN_FLIGHT = 64  # requests for each server
BACKOFF_S = 0.5  # before the second round of tries; doubles with each


@dataclass(eq=False)
class Server:
    """State of one server, as the client knows it."""

    url: str
    num_in_flight: int = 0
    models: object = None  # name to hash, as its first response had them


class RemoteReward(RewardSource):
    """Scores batches at one or several servers, over pooled connections."""

    def __init__(
        self,
        urls: str,
        *,
        batch_size: int = 8,
        timeout_s: float = 300.0,
        try_timeout_s: float = 60.0,
    ) -> None:
        """`urls` with commas between; `timeout_s` is for all tries of a request."""
        self._servers = [Server(url.strip()) for url in urls.split(",") if url.strip()]
        super().__init__(" ".join(server.url for server in self._servers), batch_size)
        self.timeout_s = timeout_s
        self.try_timeout_s = min(try_timeout_s, timeout_s)
        hosts = [_host_of(server.url) for server in self._servers]
        most = MAX_IN_FLIGHT * len(hosts)
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
        """Try until there is a response, or until tries or time have ended."""
        start_s = time.monotonic()
        counts = dict.fromkeys(self._servers, 0)
        problem = ""
        for number in range(NUM_TRIES * len(counts)):
            round_number, place = divmod(number, len(counts))
            if place == 0 and round_number:  # all have failed; jitter keeps requests apart
                longest_s = BACKOFF_S * 2 ** (round_number - 1)
                await asyncio.sleep(random.uniform(0.5, 1.0) * longest_s)
            left_s = self.timeout_s - (time.monotonic() - start_s)
            if left_s <= 0:
                break
            server = min(counts, key=lambda s: (counts[s], s.num_in_flight))
            counts[server] += 1
            answer = await self._try(server, body, headers, left_s)
            if isinstance(answer, httpx.Response):
                return server, answer
            problem = f"{server.url}: {answer}"
        seconds = time.monotonic() - start_s
        raise RewardError(
            f"{self.name}: no rewards for {batch.names()} after {sum(counts.values())} tries in "
            f"{seconds:.1f} s (--reward_timeout_s {self.timeout_s:g}): {problem}"
        )

    async def _try(
        self, server: Server, body: bytes, headers: dict[str, str], left_s: float
    ) -> httpx.Response | str:
        """Return the response, or what happened where another try may go better."""
        timeout_s = min(self.try_timeout_s, left_s)
        request = self._client.post(server.url, content=body, headers=headers)
        server.num_in_flight += 1
        try:
            answer = await asyncio.wait_for(request, timeout_s)
        except TimeoutError:
            return f"no answer in {timeout_s:.1f} s"
        except httpx.RequestError as error:
            return f"{type(error).__name__} {error}".strip()
        finally:
            server.num_in_flight -= 1
        if answer.status_code >= 500:
            return f"answered {answer.status_code}: {start_of(answer.content)}"
        return answer


def _host_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--remote_rm_url is neither one .py file nor a list of URLs: {url}. "
            "Type http://host:port/get_reward, several with commas between."
        )
    return parts.hostname


def body_of(batch: RewardBatch) -> bytes:
    """Return the body of a request; labels that JSON cannot hold, such as dates, become text."""
    parts = {"query": batch.queries, "prompts": batch.prompts, "labels": batch.labels}
    optional = {"ids": batch.sample_ids, TRUNCATED_COLUMN: batch.columns.get(TRUNCATED_COLUMN)}
    fields = parts | {name: values for name, values in optional.items() if values}
    lists = {name: list(values) for name, values in fields.items()}
    return json.dumps(lists, default=str).encode()


def result_of(answer: httpx.Response, batch: RewardBatch, server: Server) -> RewardResult:
    """Return the rewards in a response; raises RewardError for any other."""
    url, content, names = server.url, answer.content, batch.names()
    if answer.status_code != 200:
        status = answer.status_code
        raise RewardError(f"{url}: answered {status} for {names}: {start_of(content)}")
    fields = None
    with suppress(ValueError, RecursionError):
        fields = json.loads(content)
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
    models = fields.get("models")
    server.models = server.models or models
    if models and models != server.models:
        raise RewardError(
            f"{url}: it has another reward model now: {models!s:.{MAX_TEXT_SHOWN}}, before "
            f"it was {server.models!s:.{MAX_TEXT_SHOWN}}. Serve that one again, or end this run "
            "and begin another: rewards of two models are not comparable."
        )
    return checked_result(fields, batch=batch, source=url)


def start_of(content: bytes) -> str:
    """Return the first words of a response, for a message."""
    text = content[:MAX_TEXT_SHOWN].decode(errors="replace")
    return " ".join(text.split()) or "an empty body"
