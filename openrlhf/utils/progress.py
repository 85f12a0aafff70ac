"""Progress of this process and of others. Bars are rich's, drawn on a terminal only, and only for
work that lasts.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import rich.console
import rich.progress

from openrlhf.utils.console import is_terminal, make_console, notice

SAY_AFTER_S = 20.0  # without progress
DELAY_S = 1.0  # a bar appears when its work has lasted this long
REDRAWS_PER_S = 4

ItemT = TypeVar("ItemT")
# (num_done=1, total=None, completed=None): count more items, correct how many there are, or say how
# many are done.
Advance = Callable[..., None]


@dataclass
class Quiet:
    """The time without progress of something that is waited for, and when to speak of it: after
    20 s, then after twice as long, and so on.

    Example: `Quiet(seconds=12.0)` is to be spoken of after 8 s more without progress.
    """

    seconds: float = 0.0
    say_after_s: float = field(default_factory=lambda: SAY_AFTER_S)

    def add(self, seconds: float) -> bool:
        """Add time without progress; return True if it is time to speak of it."""
        self.seconds += seconds
        is_due = self.seconds >= self.say_after_s
        self.say_after_s *= 2 if is_due else 1
        return is_due

    def reset(self) -> None:
        """Begin anew: there was progress."""
        self.seconds, self.say_after_s = 0.0, SAY_AFTER_S


@contextmanager
def saying_what_is_awaited(what: str, say: Callable[[str], None] = notice) -> Iterator[None]:
    """Say now and then, while the block lasts, what it waits for."""
    is_over, quiet = threading.Event(), Quiet()

    def run() -> None:
        while not is_over.wait(left_s := quiet.say_after_s - quiet.seconds):
            quiet.add(left_s)
            say(f"waited {quiet.seconds:.0f} s for {what}")

    threading.Thread(target=run, name="awaited", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


class Health(NamedTuple):
    """The progress of a process.

    Example: `Health("training", num_done=3, total=8, pid=4711)`
    """

    work: str | None  # what goes on step by step; None: nothing of that kind
    num_done: int  # micro-batches of this work, or steps of an engine since its start
    total: int | None  # micro-batches of this work
    pid: int
    made: Sequence[Any] = ()  # by an engine since the last time: Beginnings


class _Bars(rich.progress.Progress):
    """All bars of the process, one line each; the display is open while there is one."""

    def __init__(self) -> None:
        columns = rich.progress.Progress.get_default_columns()
        super().__init__(
            *columns,
            rich.progress.MofNCompleteColumn(),
            console=make_console(),
            transient=True,
            refresh_per_second=REDRAWS_PER_S,
        )
        self._open_lock = threading.Lock()

    def make_tasks_table(self, tasks: Iterable[rich.progress.Task]) -> Any:
        """Leave out what has only just begun."""
        return super().make_tasks_table([task for task in tasks if (task.elapsed or 0) >= DELAY_S])

    def begin(self, description: str, total: int | None) -> rich.progress.TaskID:
        """Add a bar; start drawing with the first."""
        with self._open_lock:
            self.start()
            return self.add_task(description, total=total)

    def finish(self, name: rich.progress.TaskID) -> None:
        """Draw a bar for the last time; stop drawing with the last."""
        with self._open_lock:
            self.refresh()
            self.remove_task(name)
            if not self.tasks:
                self.stop()


_shared: list[_Bars] = []  # made for the first bar
_hidden: list[bool] = []  # filled by `hide_bars`


def hide_bars() -> None:
    """Draw no bars in this process: another rank on the same terminal draws for all."""
    _hidden.append(True)


def are_drawn() -> bool:
    """Return True where a person sees the bars of this process."""
    return not _hidden and is_terminal()


@contextmanager
def progress(
    description: str, total: int | None = None, *, is_shown: bool = True
) -> Iterator[Advance]:
    """Draw a bar over `total` items (None: unknown) while the block runs; yield what moves it."""
    if not is_shown or not are_drawn():
        yield lambda *_, **__: None
        return
    if not _shared:
        _shared.append(_Bars())
    [bars] = _shared
    name = bars.begin(description, total)

    def advance(num_done: int = 1, total: int | None = None, completed: int | None = None) -> None:
        step = num_done if completed is None else None
        bars.update(name, advance=step, total=total, completed=completed)

    try:
        yield advance
    finally:
        bars.finish(name)


def tracked(items: Iterable[ItemT], description: str) -> Iterator[ItemT]:
    """Yield the items and move a bar when the next one is asked for."""
    total = len(items) if isinstance(items, Sized) else None
    with progress(description, total) as advance:
        for item in items:
            yield item
            advance()
