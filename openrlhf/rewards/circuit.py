"""What the client knows of one reward server: how many tries are there now, and whether it is worth
one more.
"""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from openrlhf.errors import ConfigError

LOOPBACK_NAMES = ("localhost", "localhost.localdomain")


@dataclass(eq=False)
class ServerState:
    """A server with its circuit breaker.

    After `failures_to_open` failed tries in a row nothing is sent for `cooldown_s` seconds; then
    one try at a time, until one succeeds.
    """

    url: str
    slots: asyncio.Semaphore  # one for each request that may be in flight
    failures_to_open: int
    cooldown_s: float
    num_in_flight: int = 0  # tries that are made now or wait for a slot
    num_tries: int = 0  # in all
    num_failures: int = 0  # in a row
    closed_until_s: float = 0.0  # on the monotonic clock; no try before
    models: dict[str, object] | None = None  # name to hash, as its first answer had them

    def has_room_at(self, now_s: float) -> bool:
        """Whether a try may go there now, as far as its circuit is concerned."""
        if self.num_failures < self.failures_to_open:
            return True
        return now_s >= self.closed_until_s and self.num_in_flight == 0

    def note_start(self) -> None:
        """A try begins."""
        self.num_in_flight += 1
        self.num_tries += 1

    def note_end(self) -> None:
        """A try is over."""
        self.num_in_flight -= 1

    def note_success(self) -> None:
        """The server answers: the circuit closes."""
        self.num_failures = 0

    def note_failure(self, now_s: float) -> bool:
        """A try failed; answers whether this one opened the circuit."""
        self.num_failures += 1
        if self.num_failures >= self.failures_to_open:
            self.closed_until_s = now_s + self.cooldown_s
        return self.num_failures == self.failures_to_open


def check_urls(spec: str) -> list[str]:
    """The URLs of a comma list; raises ConfigError for one that no server can have."""
    urls = [url.strip() for url in spec.split(",") if url.strip()]
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--remote_rm_url is neither one .py file nor a list of URLs: {url}. "
                "Type http://host:port/get_reward, several with commas between."
            )
    return urls


def is_loopback(url: str) -> bool:
    """Whether a URL names this very machine: no proxy may come between."""
    host = urlsplit(url).hostname or ""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
