"""Messages of a process that runs user code to the process that started it: JSON behind a token.

A model's code may have run in there, so nothing that it sends is unpickled, and a line without the
token, which code or its children may write to any descriptor, is no message. The other way is
trusted: it is pickled.
"""

import asyncio
import json
from contextlib import suppress
from typing import Any

MAX_LINE_BYTES = 2**28


def marked_line(token: str, message: object) -> bytes:
    """Return a message as a line of its own, wherever half a line of somebody else may stand;
    dataclasses become objects of JSON.
    """
    return f"\n{token}{json.dumps(message, default=vars)}\n".encode()


async def next_message(reader: asyncio.StreamReader, token: str) -> dict[str, Any] | None:
    """Return the next message that has the token, None when the connection was closed; ValueError
    for half a message, or one that is too long.
    """
    mark = token.encode()
    with suppress(ConnectionError):  # of a process that was killed
        while line := await _line(reader):
            if line.startswith(mark):
                return _parsed(line.removeprefix(mark))
    return None


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("sent half a message")
    return found


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError:
        most = MAX_LINE_BYTES // 2**20
        raise ValueError(f"sent a line of more than {most} MiB") from None
