"""Typed errors and the exit code each one ends the process with.

0 everything promised was done, 2 the user's input was wrong, 3 a fault could not be survived, 4 a
bug of ours. Every error pickles, because most of them cross a process boundary before a person
reads them.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self


class OpenRLHFError(Exception):
    """Base of every error this package raises on purpose; the message is one line a user can act
    on.
    """

    exit_code = 4
    user_traceback = ""  # where an error in code of the user's is behind it

    def in_user_code(self, user_traceback: str) -> Self:
        """Return this error with the traceback of the user's error that is behind it, if one is:
        then the process ends as after any other wrong input.
        """
        if user_traceback:
            self.user_traceback, self.exit_code = user_traceback, ConfigError.exit_code
        return self


class ConfigError(OpenRLHFError):
    """The configuration contradicts itself or names something that is not there; lists every
    problem found.
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        super().__init__(problems if isinstance(problems, str) else "\n".join(problems))

    @property
    def problems(self) -> list[str]:
        """Return the problems, each a line."""
        return str(self).splitlines()


class DataError(ConfigError):
    """Rows, columns or files of a dataset are not what the command needs; lists every problem
    found.
    """


class Gathered:
    """Several things that are read one by one, all of whose problems are said together."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.user_tracebacks: list[str] = []

    def __enter__(self) -> None:
        """Begin a block that is left at its first ConfigError, which is noted; the program goes on
        behind the block.
        """

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, ConfigError):
            self.note(error)
        return isinstance(error, ConfigError)

    @contextmanager
    def about(self, name: str) -> Iterator[None]:
        """Do the same, and begin the first line of what is noted with `name`."""
        try:
            yield
        except ConfigError as error:
            self.note(error, about=name)

    def note(self, error: OpenRLHFError, *, about: str = "") -> None:
        """Note the problems of an error."""
        first, *others = str(error).splitlines()
        is_said = not others and first in self.problems
        self.problems += [] if is_said else [about + first, *others]
        self.user_tracebacks += filter(None, [error.user_traceback])

    def raise_if_any(self) -> None:
        """Raise DataError with everything that was noted."""
        if self.problems:
            error = DataError(list(dict.fromkeys(self.problems)))
            raise error.in_user_code("\n".join(self.user_tracebacks))


class RewardError(OpenRLHFError):
    """A reward could not be computed, is not finite, or does not match its samples."""

    exit_code = 3


class EngineError(OpenRLHFError):
    """A rollout engine failed or returned something impossible."""

    exit_code = 3


class LostEngineError(EngineError):
    """The process of an engine has died, or was ended because it hung."""

    made: Mapping[int, Any] = {}  # beginning of each sample of a request, a Completion, where known


WITH_ITS_NODE = "ended with its node"  # of a process


class LostRankError(EngineError):
    """The process of a rank has died, or was ended because it hung."""

    role = ""  # of its group


class NoRestartError(EngineError):
    """A fault that another process in place of a lost one would meet, too."""


class WeightSyncError(OpenRLHFError):
    """An engine does not hold the weights the trainer sent."""

    exit_code = 3


class CheckpointError(OpenRLHFError):
    """A checkpoint is missing, torn or does not fit this run."""

    exit_code = 3


class NumericsError(OpenRLHFError):
    """A loss, gradient or weight is not finite."""

    exit_code = 3


class SkippedUpdate(NumericsError):
    """An optimizer step that was skipped: the weights stay, and the run goes on."""


class MachineError(OpenRLHFError):
    """The machine has no room, memory or processes left, or what runs on it did not start."""

    exit_code = 3


NO_MEMORY = ("out of memory", "DefaultCPUAllocator")  # what torch says
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)


def machine_fault(error: BaseException) -> MachineError | None:
    """Return an error of the system as one of the machine, if it says that something ran out."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY):
        return MachineError(
            f"{first_line(error).rstrip('.')}. Make batches smaller, or take another way that "
            '"Out of memory" in docs/troubleshooting.md names.'
        )
    if not isinstance(error, OSError) or error.errno not in NO_ROOM:
        return None
    where = f" ({error.filename})" if error.filename else ""
    return MachineError(
        f"this machine is out of something: {error.strerror}{where}. Look at `df -h` (of /dev/shm "
        "too), `free` and `ulimit -a`."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error, with the next one if it ends in a colon; its name where it
    says nothing.
    """
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first
