"""Rewards from HTTP servers: POST {query, prompts, labels, ids} returns {rewards, scores?,
extra_logs?, ids?, models?}.

Every batch is scored exactly once, by one of the servers, or ends in a RewardError. After 408, 425,
429, 5xx and broken connections it is tried again, at another server first, until its time is over.
What comes is bounded in bytes, as sent and unpacked, and in time.
"""

import asyncio
import json
import math
import os
import random
import time
import uuid
import zlib
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin, urlsplit

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
from openrlhf.utils.console import warn

TOKEN_VARIABLE = "OPENRLHF_REWARD_TOKEN"  # sent as a bearer token where it is set
TRY_AGAIN = (408, 425, 429)  # and 5xx: statuses of a server that may answer another try
MAX_TEXT_SHOWN = 200
MAX_IN_FLIGHT = 64  # requests for each server
BACKOFF_S, MAX_BACKOFF_S = 0.5, 15.0  # before the second try at a server; doubles with each
WARN_EVERY_S = 60.0
LEAST_TRY_S = 0.05  # for a try
MAX_BYTES = 2**24  # of a response, as sent and unpacked
UNPACKS = 32 + zlib.MAX_WBITS  # gzip or deflate, by its header
ENVELOPE = (
    "ids",
    "models",
    "request_id",
    "truncated",
)  # of a response, besides a function's result


def checked_token(token: str, source: str) -> str:
    """Return a token without the space around it, which mounted secrets have; raise ConfigError for
    one that no header can carry.
    """
    token = token.strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{source} holds a token that cannot be sent. Use letters, digits and signs of ASCII."
        )
    return token


@dataclass(eq=False)
class Server:
    """State of one server, as the client knows it.

    Example: `Server("http://10.0.0.2:5000/get_reward", num_in_flight=3, models={"rm": "9f2c51"})`
    """

    url: str
    num_in_flight: int = 0
    models: object = None  # name to hash, as its first response had them
    warned_s: float = -WARN_EVERY_S  # when it was last said that it is away


@dataclass(frozen=True)
class Reply:
    """A response, whole.

    Example: `Reply(503, b"busy", httpx.Headers({"retry-after": "2"}))`
    """

    status: int
    content: bytes
    headers: httpx.Headers


@dataclass(frozen=True)
class Failure:
    """Why a try may go better another time.

    Example: `Failure("answered 503: busy", wait_s=2.0)`
    """

    problem: str
    wait_s: float = 0.0  # that the server asks for


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
        """Raise ConfigError for what is no URL. `urls` with commas between; `timeout_s` is for all
        tries of a request.
        """
        self._servers = [Server(url.strip()) for url in urls.split(",") if url.strip()]
        hosts = [_host_of(server.url) for server in self._servers]
        super().__init__(" ".join(server.url for server in self._servers), batch_size)
        self.timeout_s = timeout_s
        self.try_timeout_s = min(try_timeout_s, timeout_s)
        most = MAX_IN_FLIGHT * len(hosts)
        token = checked_token(os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE)
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
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "gzip",
            "X-Request-Id": uuid.uuid4().hex,
        }
        async with self._places:  # the time limit begins when it is this request's turn
            server, reply = await self._tries(batch, body, headers)
        return result_of(reply, batch, server)

    async def release(self) -> None:
        await self._client.aclose()

    async def _tries(
        self, batch: RewardBatch, body: bytes, headers: dict[str, str]
    ) -> tuple[Server, Reply]:
        """Try until there is a response, or until time has ended."""
        start_s = time.monotonic()
        end_s = start_s + self.timeout_s
        ready_s = dict.fromkeys(self._servers, start_s)  # when each may be tried
        pauses_s = dict.fromkeys(self._servers, BACKOFF_S)
        problem, num_tries = "", 0
        last_s = end_s - min(LEAST_TRY_S, self.timeout_s / 10)  # a shorter try would hide a problem
        while (now_s := time.monotonic()) < last_s:
            server = min(ready_s, key=lambda s: (max(ready_s[s], now_s), s.num_in_flight))
            if ready_s[server] > now_s:
                await asyncio.sleep(min(ready_s[server], last_s) - now_s)
                continue
            num_tries += 1
            found = await self._try(server, body, headers, end_s - now_s)
            if isinstance(found, Reply):
                return server, found
            self._warn(server, found.problem)
            problem = f"{server.url}: {found.problem}"
            pause_s = random.uniform(0.5, 1.0) * pauses_s[server]  # keeps requests apart
            pauses_s[server] = min(2 * pauses_s[server], MAX_BACKOFF_S)
            ready_s[server] = time.monotonic() + max(pause_s, found.wait_s)
        raise RewardError(
            f"{self.name}: no rewards for {batch.names()} after {num_tries} tries in "
            f"{time.monotonic() - start_s:.1f} s (--reward_timeout_s {self.timeout_s:g}): {problem}"
        )

    def _warn(self, server: Server, problem: str) -> None:
        """Say that a server is away, now and then."""
        if time.monotonic() - server.warned_s > WARN_EVERY_S:
            server.warned_s = time.monotonic()
            limit = f"--reward_timeout_s {self.timeout_s:g}"
            warn(f"{server.url}: {problem}. It is tried again until {limit} is over.")

    async def _try(
        self, server: Server, body: bytes, headers: dict[str, str], left_s: float
    ) -> Reply | Failure:
        """Return the response, or what happened where another try may go better."""
        timeout_s = min(self.try_timeout_s, left_s)
        server.num_in_flight += 1
        try:
            reply = await asyncio.wait_for(self._post(server.url, body, headers), timeout_s)
        except TimeoutError:
            return Failure(f"no answer in {timeout_s:.1f} s")
        except httpx.RequestError as error:
            return Failure(f"{type(error).__name__} {error}".strip())
        finally:
            server.num_in_flight -= 1
        if reply.status in TRY_AGAIN or reply.status >= 500:
            problem = f"answered {reply.status}: {start_of(reply.content)}"
            return Failure(problem, _seconds_of(reply.headers.get("retry-after", "")))
        return reply

    async def _post(self, url: str, body: bytes, headers: dict[str, str]) -> Reply:
        """Return the response of a server; raise RewardError for more bytes than may be."""
        content = bytearray()
        async with self._client.stream("POST", url, content=body, headers=headers) as response:
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > MAX_BYTES:
                    break
        unpacked = bytes(content)
        encoding = response.headers.get("content-encoding", "").lower()
        is_packed = encoding not in ("", "identity")
        if is_packed and len(content) <= MAX_BYTES:
            unpacked = _unpacked(url, unpacked)
        if len(unpacked) > MAX_BYTES:
            most = MAX_BYTES // 2**20
            raise RewardError(f"{url}: the answer is larger than {most} MiB. Send rewards alone.")
        return Reply(response.status_code, unpacked, response.headers)


def _host_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--remote_rm_url is neither one .py file nor a list of URLs: {url}. "
            "Type http://host:port/get_reward, several with commas between."
        )
    return parts.hostname


def _seconds_of(retry_after: str) -> float:
    """Return the seconds that a server asks to wait, by their number or by a date (RFC 9110,
    section 10.2.3); 0 for anything else.
    """
    for read in (float, lambda date: parsedate_to_datetime(date).timestamp() - time.time()):
        with suppress(ValueError, OverflowError):
            wait_s = read(retry_after)
            return max(wait_s, 0.0) if math.isfinite(wait_s) else 0.0
    return 0.0


def _unpacked(url: str, content: bytes) -> bytes:
    """Return the unpacked bytes of a response, at most one more than may be."""
    try:
        return zlib.decompressobj(UNPACKS).decompress(content, MAX_BYTES + 1)
    except zlib.error as error:
        raise RewardError(
            f"{url}: the answer is compressed, and not as gzip: {error}. Send it as it is."
        ) from error


def body_of(batch: RewardBatch) -> bytes:
    """Return the body of a request; labels that JSON cannot hold, such as dates, become text."""
    parts = {"query": batch.queries, "prompts": batch.prompts, "labels": batch.labels}
    optional = {"ids": batch.sample_ids, TRUNCATED_COLUMN: batch.columns.get(TRUNCATED_COLUMN)}
    fields = parts | {name: values for name, values in optional.items() if values}
    lists = {name: list(values) for name, values in fields.items()}
    return json.dumps(lists, default=str).encode()


def result_of(reply: Reply, batch: RewardBatch, server: Server) -> RewardResult:
    """Return the rewards in a response; raises RewardError for any other."""
    url, content, names = server.url, reply.content, batch.names()
    if target := reply.headers.get("location", "") if 300 <= reply.status < 400 else "":
        with suppress(ValueError):  # no address
            target = urljoin(url, target)
        raise RewardError(
            f"{url}: answered {reply.status} for {names}: it redirects to "
            f"{target!r:.{MAX_TEXT_SHOWN}}. Type that address as --remote_rm_url."
        )
    if reply.status != 200:
        status = reply.status
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
    rewards = {name: value for name, value in fields.items() if name not in ENVELOPE}
    return checked_result(rewards, batch=batch, source=url)


def start_of(content: bytes) -> str:
    """Return the first words of a response, for a message."""
    text = content[:MAX_TEXT_SHOWN].decode(errors="replace")
    return " ".join(text.split()) or "an empty body"
