"""Progress bars: one form for all work that lasts, drawn on a terminal only.

Where a process has no terminal its bars may be sent to one that has (progress_relay.py). A bar
costs microseconds a move: it counts, and what is drawn or sent follows now and then.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import rich.console
import rich.progress

from openrlhf.utils.logging import is_terminal, make_console

DELAY_S = 1.0  # what is done sooner shows no bar
REDRAWS_PER_S = 4  # of a bar that does not move
REFRESH_S = 0.1  # between two looks at the counts of a bar

ItemT = TypeVar("ItemT")


class Advance(Protocol):
    """Moves a progress bar."""

    def __call__(self, num_done: int = 1, total: int | None = None) -> None:
        """Count `num_done` more items as done; `total` corrects how many there are."""


class Display(Protocol):
    """Where bars are shown."""

    delay_s: float  # a bar appears when its work has lasted this long

    def show(self, bar: object, description: str, num_done: int, total: int | None) -> None:
        """Draw a bar, or draw it anew."""

    def hide(self, bar: object) -> None:
        """Remove a bar."""


def no_advance(num_done: int = 1, total: int | None = None) -> None:
    """Nobody watches."""


@contextmanager
def progress(
    description: str, total: int | None = None, *, is_shown: bool = True
) -> Iterator[Advance]:
    """A bar over `total` items (None: only that work goes on); yields the function that moves it.

    It is drawn where this process' bars are shown, once the work has lasted, and removed at the
    end.
    """
    display = _where_bars_go() if is_shown else None
    if display is None:
        yield no_advance
        return
    bar = _Bar(display, description, total)
    try:
        yield bar.advance
    finally:
        bar.close()


@contextmanager
def counter(description: str, *, is_shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar moved by totals: yields a function of (items done, items in all)."""
    with progress(description, is_shown=is_shown) as advance:
        last = 0

        def show(num_done: int, total: int) -> None:
            nonlocal last
            advance(num_done - last, total)
            last = num_done

        yield show


def tracked(items: Iterable[ItemT], description: str) -> Iterator[ItemT]:
    """The items, with a bar that moves when the next one is asked for."""
    total = len(items) if isinstance(items, Sized) else None
    with progress(description, total) as advance:
        for item in items:
            yield item
            advance()


def bars_for_tqdm(names: dict[str, str]) -> Callable[[Callable[..., Any], tuple, dict], Any]:
    """A hook for transformers' `set_tqdm_hook`: loops with one of these names get a bar of ours,
    by the text that belongs to the name; other loops get what they asked for.
    """

    def hook(factory: Callable[..., Any], args: tuple, options: dict[str, Any]) -> Any:
        description = names.get(options.get("desc", ""))
        if description is None or not args:
            return factory(*args, **options)
        return tracked(args[0], description)

    return hook


class _Bar:
    """Counts at once; appears after a delay, by a timer, so that a slow first item shows too."""

    _numbers = itertools.count()

    def __init__(self, display: Display, description: str, total: int | None) -> None:
        self.display = display
        self.description = description
        self.num_done = 0
        self.total = total
        self._name = next(self._numbers)
        self._next_look_s = float("inf")  # set when it appears
        self._is_open = True
        self._lock = threading.Lock()
        self._timer = threading.Timer(display.delay_s, self._appear)
        self._timer.daemon = True
        self._timer.start()

    def advance(self, num_done: int = 1, total: int | None = None) -> None:
        """See Advance."""
        self.num_done += num_done
        if total is not None:
            self.total = total
        if time.monotonic() >= self._next_look_s:
            self._show()

    def close(self) -> None:
        """Remove it; it does not come again."""
        self._timer.cancel()
        with self._lock:
            self._is_open = False
            if self._next_look_s < float("inf"):
                self.display.hide(self._name)

    def _appear(self) -> None:
        with self._lock:
            if self._is_open:
                self._show()

    def _show(self) -> None:
        self._next_look_s = time.monotonic() + REFRESH_S
        self.display.show(self._name, self.description, self.num_done, self.total)


class Screen:
    """All bars of a process on its terminal, a line each; gone when none is left."""

    delay_s = DELAY_S

    def __init__(self, console: Callable[[], rich.console.Console] = make_console) -> None:
        self._console = console
        self._live: rich.progress.Progress | None = None
        self._tasks: dict[object, rich.progress.TaskID] = {}
        self._lock = threading.Lock()

    def show(self, bar: object, description: str, num_done: int, total: int | None) -> None:
        """See Display."""
        with self._lock:
            if self._live is None:
                self._live = self._open()
            if bar not in self._tasks:
                self._tasks[bar] = self._live.add_task(description, total=total)
            task = self._tasks[bar]
            self._live.update(
                task, description=description, total=total, completed=num_done, refresh=True
            )

    def hide(self, bar: object) -> None:
        """See Display."""
        with self._lock:
            if self._live is None or bar not in self._tasks:
                return
            self._live.remove_task(self._tasks.pop(bar))
            if not self._tasks:
                self._live.stop()
                self._live = None

    def _open(self) -> rich.progress.Progress:
        columns = (
            *rich.progress.Progress.get_default_columns(),
            rich.progress.MofNCompleteColumn(),
        )
        live = rich.progress.Progress(
            *columns, console=self._console(), transient=True, refresh_per_second=REDRAWS_PER_S
        )
        live.start()
        return live


SCREEN = Screen()  # of this process
_chosen: list[Display | None] = []  # the last one counts; empty: the terminal, if there is one


def show_bars_on(display: Display | None) -> None:
    """Send this process' bars there from now on, instead of to its terminal; None: nowhere."""
    _chosen[:] = [display]


def _where_bars_go() -> Display | None:
    if _chosen:
        return _chosen[0]
    return SCREEN if is_terminal() else None
