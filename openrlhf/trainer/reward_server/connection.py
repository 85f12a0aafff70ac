"""HTTP connections that cannot be held open by saying nothing, and that say why they end.

uvicorn bounds the size of headers, but neither the time in which a request must have arrived, nor
what it may go on sending once it was refused, nor the number of connections; that is done here.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from openrlhf.config.reward_server import ServerLimitsConfig

KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they are the ones to close
READ_BODIES = 4  # times the largest request are read of one that was refused
NOT_YET_ARRIVED = (h11.IDLE, h11.SEND_BODY)


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol with a deadline and a size for requests, and a limit of connections."""

    receive_timeout_s: float
    max_connections: int
    max_request_bytes: int  # refused ones are read up to here, so that the refusal is seen

    _deadline: asyncio.TimerHandle | None = None
    _num_bytes = 0  # of the request that is arriving

    def connection_made(self, transport: Any) -> None:
        """Take the connection, or close it when there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        """Read on; the clock runs from the first byte of a request to its last."""
        self._num_bytes += len(data)
        if self._num_bytes > self.max_request_bytes:
            self.transport.abort()
            return
        super().data_received(data)
        self._watch_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_clock()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Go on with what was sent behind the request; end a connection that sent nonsense."""
        super().on_response_complete()
        if self.conn.their_state is h11.ERROR:
            self.transport.close()
        self._watch_clock()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the words of all other refusals."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = json.dumps({"error": msg.rstrip("."), "field": None}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_clock(self) -> None:
        state = self.conn.their_state
        is_idle = state is h11.IDLE and not self.conn.trailing_data[0]
        if is_idle or state not in NOT_YET_ARRIVED:
            self._stop_clock()
        elif self._deadline is None and not self.transport.is_closing():
            self._start_clock()

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(self.receive_timeout_s, self._give_up)

    def _stop_clock(self) -> None:
        self._num_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self.transport.abort()


def guarded_protocol(limits: ServerLimitsConfig) -> type[GuardedProtocol]:
    """The protocol class with these limits."""
    facts = {
        "receive_timeout_s": limits.receive_timeout_s,
        "max_connections": limits.max_connections,
        "max_request_bytes": READ_BODIES * limits.max_body_bytes,
    }
    return type("LimitedProtocol", (GuardedProtocol,), facts)
