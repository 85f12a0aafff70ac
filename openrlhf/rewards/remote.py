"""Rewards from HTTP servers: POST {query, prompts, labels, ids}, answered by {rewards, scores?,
extra_logs?, ids?, models?}.

Every batch is answered exactly once, by one of the servers, or ends in a RewardError. Tries are
repeated after 5xx answers and broken connections only, at another server first.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import uuid
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from openrlhf.errors import RewardError
from openrlhf.rewards.base import RewardBatch, RewardResult, joined
from openrlhf.rewards.circuit import ServerState, check_urls, is_loopback
from openrlhf.rewards.remote_messages import body_of, caution_of_models, result_of, start_of
from openrlhf.utils.logging import warn

TOKEN_VARIABLE = "OPENRLHF_REWARD_TOKEN"  # sent as a bearer token where it is set
MAX_ANSWER_BYTES = 64 * 1024**2
POLL_S = 0.05  # between two looks at whether a server may be tried again
WHOLE_TRY = 0.9  # of --reward_try_timeout_s: after less without an answer no server is to blame


@dataclass(frozen=True)
class RemoteSettings:
    """Sizes and limits of the client."""

    batch_size: int = 8  # most samples in a request
    timeout_s: float = 300.0  # for all tries of a request and its waits for a slot
    try_timeout_s: float = 60.0
    num_tries: int = 3  # of a request at each server
    max_in_flight: int = 64  # requests at each server
    backoff_s: float = 0.5  # before the second try at the same server; doubles with each
    failures_to_open: int = 8  # failed tries in a row after which a server is left alone
    cooldown_s: float = 10.0


class _TryAgain(Exception):
    """A try failed in a way that may pass: 5xx, no connection, no answer in time."""


class _OutOfTime(Exception):
    """The time of a request ran out before the server had had its time for a try."""


class RemoteReward:
    """Scores batches at one or several servers; see StreamingSource.

    All requests run on one event loop in a thread of its own, over pooled connections.
    """

    def __init__(self, urls: str, settings: RemoteSettings | None = None) -> None:
        """`urls` with commas between; raises ConfigError for one that is none."""
        self.settings = settings or RemoteSettings()
        names = check_urls(urls)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="reward-client", daemon=True
        )
        self._thread.start()
        self._servers, self._clients = self._run(self._open(names)).result()
        self._has_cautioned = False

    def score(self, batch: RewardBatch) -> RewardResult:
        """See RewardSource."""
        return self.submit(batch).result()

    def submit(self, batch: RewardBatch) -> Future[RewardResult]:
        """See StreamingSource."""
        parts = batch.parts(self.settings.batch_size)
        return joined([self._run(self._score(part)) for part in parts], source=self._who)

    def close(self) -> None:
        """Close the connections; what is not answered fails."""
        if self._loop.is_running():
            self._run(self._close()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    @property
    def _who(self) -> str:
        return " ".join(server.url for server in self._servers)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _open(
        self, urls: list[str]
    ) -> tuple[list[ServerState], dict[str, httpx.AsyncClient]]:
        settings = self.settings
        servers = [
            ServerState(
                url,
                asyncio.Semaphore(settings.max_in_flight),
                settings.failures_to_open,
                settings.cooldown_s,
            )
            for url in urls
        ]
        self._places = asyncio.Semaphore(settings.max_in_flight * len(urls))
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(
            max_connections=settings.max_in_flight,
            max_keepalive_connections=settings.max_in_flight,
        )
        make = partial(httpx.AsyncClient, headers=headers, limits=limits, timeout=None)
        # No certificates are read where none is shown: that takes a while.
        return servers, {
            url: make(trust_env=not is_loopback(url), verify=url.startswith("https"))
            for url in urls
        }

    async def _close(self) -> None:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()

    async def _score(self, batch: RewardBatch) -> RewardResult:
        body = body_of(batch)
        headers = {"Content-Type": "application/json", "X-Request-Id": uuid.uuid4().hex}
        async with self._places:  # the time limit begins when it is this request's turn
            return await self._tries(batch, body, headers)

    async def _tries(
        self, batch: RewardBatch, body: bytes, headers: dict[str, str]
    ) -> RewardResult:
        """Try until an answer, a refusal, or the end of tries or time."""
        limit = self.settings.timeout_s
        tries = _Tries(self._servers, self.settings)
        while True:
            server = await tries.next_server()
            if server is None:
                raise RewardError(
                    f"{self._who}: no rewards for {batch.names()} after {tries.num_done} tries in "
                    f"{tries.seconds:.1f} s (--reward_timeout_s {limit:g}): {tries.last_problem}"
                )
            try:
                async with _Slot(server, tries):
                    answer = await self._one_try(server.url, body, headers, tries.seconds_left)
            except _OutOfTime as problem:
                tries.last_problem = f"{server.url}: {problem}"
            except _TryAgain as problem:
                tries.note_failure(server, f"{server.url}: {problem}")
            else:
                server.note_success()
                result = result_of(answer.status_code, answer.content, batch, server)
                self._compare_models()
                return result
            finally:
                server.note_end()

    def _compare_models(self) -> None:
        """Say once that the servers' models differ: it may be meant."""
        caution = None if self._has_cautioned else caution_of_models(self._servers)
        if caution is not None:
            self._has_cautioned = True
            warn(caution)

    async def _one_try(
        self, url: str, body: bytes, headers: dict[str, str], seconds_left: float
    ) -> httpx.Response:
        whole_s = self.settings.try_timeout_s
        timeout_s = min(whole_s, max(seconds_left, 0.0))
        try:
            answer = await asyncio.wait_for(self._post(url, body, headers), timeout_s)
        except asyncio.TimeoutError as error:
            kind = _TryAgain if timeout_s >= WHOLE_TRY * whole_s else _OutOfTime
            raise kind(f"no answer in {timeout_s:.1f} s") from error
        except httpx.TransportError as error:
            raise _TryAgain(f"{type(error).__name__} {error}".strip()) from error
        except httpx.DecodingError as error:
            raise RewardError(f"{url}: the answer cannot be decoded: {error}") from error
        if answer.status_code >= 500:
            raise _TryAgain(f"answered {answer.status_code}: {start_of(answer.content)}")
        return answer

    async def _post(self, url: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
        client = self._clients[url]
        async with client.stream("POST", url, content=body, headers=headers) as answer:
            pieces, size = [], 0
            async for piece in answer.aiter_bytes():
                pieces.append(piece)
                size += len(piece)
                if size > MAX_ANSWER_BYTES:
                    raise RewardError(f"{url}: the answer is larger than {MAX_ANSWER_BYTES} bytes")
            return httpx.Response(answer.status_code, content=b"".join(pieces))


class _Tries:
    """The tries of one request: where the next one goes, and when."""

    def __init__(self, servers: list[ServerState], settings: RemoteSettings) -> None:
        self.settings = settings
        self.counts = dict.fromkeys(servers, 0)
        self.ready_s = dict.fromkeys(servers, 0.0)  # when a server may be tried again
        self.start_s = time.monotonic()
        self.last_problem = "every server is left alone after failures"

    @property
    def num_done(self) -> int:
        """Tries made."""
        return sum(self.counts.values())

    @property
    def seconds(self) -> float:
        """Time since the first."""
        return time.monotonic() - self.start_s

    @property
    def seconds_left(self) -> float:
        """Time that is left for more."""
        return self.settings.timeout_s - self.seconds

    async def next_server(self) -> ServerState | None:
        """The server for the next try, once it may be made; None when tries or time are used up."""
        while self.seconds_left > 0:
            left = [s for s, n in self.counts.items() if n < self.settings.num_tries]
            if not left:
                return None
            now_s = time.monotonic()
            ready = [s for s in left if self.ready_s[s] <= now_s and s.has_room_at(now_s)]
            if ready:
                server = min(ready, key=lambda s: (self.counts[s], s.num_in_flight, s.num_tries))
                self.counts[server] += 1
                server.note_start()
                return server
            await asyncio.sleep(min(POLL_S, self.seconds_left))
        return None

    def note_failure(self, server: ServerState, problem: str) -> None:
        """Remember what went wrong; says so when a server is left alone from now on."""
        self.last_problem = problem
        # Doubles with every try; the jitter keeps requests from coming back together.
        longest_s = self.settings.backoff_s * 2 ** (self.counts[server] - 1)
        self.ready_s[server] = time.monotonic() + random.uniform(0.5, 1.0) * longest_s
        if server.note_failure(time.monotonic()):
            warn(f"reward server left alone for {self.settings.cooldown_s:g} s: {problem}")


@dataclass(frozen=True)
class _Slot:
    """A block that runs once the server has a slot for it; _OutOfTime when none is free in time."""

    server: ServerState
    tries: _Tries

    async def __aenter__(self) -> None:
        try:
            await asyncio.wait_for(self.server.slots.acquire(), self.tries.seconds_left)
        except asyncio.TimeoutError as error:
            self.tries.counts[self.server] -= 1  # it was never made
            raise _OutOfTime("all its slots were taken by other requests") from error

    async def __aexit__(self, *error: object) -> None:
        self.server.slots.release()
