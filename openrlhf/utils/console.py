"""What the package says on the console and in the log file of a role: plain lines, on a terminal
and elsewhere; bars are in progress.py.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from io import TextIOWrapper
from typing import Any

import rich.console

from openrlhf.config.base import Caution

STRICT = ("strict", "surrogateescape")  # ways in which a stream fails at a character
LOGGER = logging.getLogger("openrlhf")
LOGGER.addHandler(logging.NullHandler())
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False


class _Console(rich.console.Console):
    """A console without which a run goes on: its disk may be full, its reader gone, its encoding
    without the characters of a response.
    """

    def print(self, *objects: Any, **style: Any) -> None:
        """Print what can be printed, and escapes of characters that the encoding does not have."""
        if isinstance(self.file, TextIOWrapper) and self.file.errors in STRICT:
            self.file.reconfigure(errors="backslashreplace")
        with suppress(OSError):
            super().print(*objects, **style)

    def on_broken_pipe(self) -> None:
        """Print to nobody from now on; rich would end the process."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def make_console(*, is_error: bool = False) -> rich.console.Console:
    """Return a console on stdout (or stderr) that colours only what the caller marks."""
    return _Console(stderr=is_error, highlight=False, soft_wrap=True, markup=False)


def is_terminal() -> bool:
    """Return True if a person watches: progress bars are drawn only then."""
    return make_console().is_terminal


def notice(message: str) -> None:
    """Say one line on the console and in the role's log file."""
    make_console().print(message)
    log(message)


def log(message: str) -> None:
    """Write to the role's log file alone."""
    LOGGER.info(message)


def warn(message: str) -> None:
    """Say one line that deserves attention on stderr and in the role's log file."""
    make_console(is_error=True).print(f"warning: {message}", style="yellow")
    LOGGER.warning(message)


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect what is warned of in the block."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    try:
        yield found
    finally:
        LOGGER.removeHandler(handler)


@cache
def warn_once(message: str) -> None:
    """Warn, once in the life of the process for one text."""
    warn(message)


def say_notices(lines: Iterable[str], *, about: str = "") -> None:
    """Say notices on stderr and in the role's log file: cautions as warnings, others plainly.

    `about` says what all of them are about.
    """
    for line in lines:
        if isinstance(line, Caution):
            warn(about + line)
        else:
            make_console(is_error=True).print(f"note: {about}{line}")
            LOGGER.info("%s%s", about, line)


def format_count(number: float) -> str:
    """Return the short form of a count: 950, 1.8k, 3.1M, 7.2B."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{suffix}"
    return f"{number:.0f}"


def format_seconds(seconds: float) -> str:
    """Return the short form of a duration: 45s, 3m20s, 2h05m, 1d04h."""
    whole = round(seconds)
    for size, unit, part_size, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part_size:02}{part}"
    return f"{whole // 60}m{whole % 60:02}s" if whole >= 60 else f"{whole}s"


def print_banner(sections: Mapping[str, Mapping[str, object]]) -> None:
    """Say what is about to run: a block a section (model, devices, batch, ...), a line an entry."""
    width = max((len(name) for entries in sections.values() for name in entries), default=0)
    lines = []
    for title, entries in sections.items():
        lines.append(title)
        lines.extend(f"  {name:<{width}}  {value}" for name, value in entries.items())
    notice("\n".join(lines))
