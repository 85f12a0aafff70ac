"""Bars of workers on the controller's terminal: small datagrams, sent now and then, lost at worst.

A worker neither waits for the controller nor answers it, so bars cost nothing while it computes
and cannot hold a run up. Without a terminal there is no relay, and workers have no bars.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from dataclasses import dataclass
from typing import Any

from openrlhf.utils.progress import DELAY_S, Display

MAX_BYTES = 2048
MAX_DESCRIPTION = 100  # letters
POLL_S = 0.5  # of the thread that listens: how long its end may take


@dataclass(frozen=True)
class RelayAddress:
    """Where a worker sends its bars; the key keeps strangers' datagrams off the screen."""

    host: str
    port: int
    key: str
    delay_s: float = DELAY_S


class ProgressRelay:
    """Receives bars of workers and shows them until it is closed."""

    def __init__(self, display: Display, host: str = "127.0.0.1") -> None:
        """`host`: this machine's address, as workers elsewhere reach it."""
        self.display = display
        self._socket = socket.socket(_family(host), socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self._socket.settimeout(POLL_S)
        self.address = RelayAddress(
            host, self._socket.getsockname()[1], secrets.token_hex(8), display.delay_s
        )
        self._shown: set[tuple[str, int]] = set()
        self._is_open = True
        self._thread = threading.Thread(target=self._listen, name="progress-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; bars that are left go."""
        self._is_open = False
        self._thread.join()
        self._socket.close()
        for bar in self._shown:
            self.display.hide(bar)

    def _listen(self) -> None:
        while self._is_open:
            try:
                message = json.loads(self._socket.recv(MAX_BYTES))
            except (TimeoutError, ValueError):
                continue
            if isinstance(message, dict) and message.get("key") == self.address.key:
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        bar = (message["sender"], message["bar"])
        if message["is_open"]:
            self._shown.add(bar)
            self.display.show(bar, message["description"], message["num_done"], message["total"])
        elif bar in self._shown:
            self._shown.discard(bar)
            self.display.hide(bar)


class RelayedDisplay:
    """This process' bars on the terminal of another."""

    def __init__(self, address: RelayAddress, sender: str) -> None:
        """`sender` names this process among those that send."""
        self.delay_s = address.delay_s
        self.sender = sender
        self._address = address
        self._socket = socket.socket(_family(address.host), socket.SOCK_DGRAM)
        self._socket.settimeout(0)  # never waits

    def show(self, bar: object, description: str, num_done: int, total: int | None) -> None:
        """See Display."""
        self._send(
            bar=bar,
            is_open=True,
            description=description[:MAX_DESCRIPTION],
            num_done=num_done,
            total=total,
        )

    def hide(self, bar: object) -> None:
        """See Display; said twice, for one may be lost."""
        for _ in range(2):
            self._send(bar=bar, is_open=False)

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def _send(self, **message: object) -> None:
        content = {"key": self._address.key, "sender": self.sender, **message}
        try:
            self._socket.sendto(
                json.dumps(content).encode(), (self._address.host, self._address.port)
            )
        except OSError:  # nobody listens there any more, or the way is blocked: no bar
            return


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
