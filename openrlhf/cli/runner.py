"""Shared by all commands: help, parsing, secrets, errors as lines and exit codes.

Exit codes: 0 done, 2 wrong input, 3 a fault that could not be survived, 4 a bug, 130 interrupted.
"""

import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pkgutil import resolve_name
from typing import Generic

from openrlhf.config.base import UNNAMED, CommandConfig, with_value
from openrlhf.config.cli import ConfigT, read_config
from openrlhf.config.common import RunConfig
from openrlhf.config.help import help_text
from openrlhf.config.local_paths import path_notices, path_problems
from openrlhf.config.methods import METHODS
from openrlhf.distributed.topology import Topology
from openrlhf.errors import ConfigError, OpenRLHFError, machine_fault
from openrlhf.utils.snapshots import library_problems, with_snapshots
from openrlhf.utils.weight_files import weight_problems

SHARED_MEMORY = "/dev/shm"
MIN_SHARED_MEMORY = 16_000_000  # bytes; a container of Docker has four times as many

Work = Callable[..., None]


@dataclass(frozen=True)
class Command(Generic[ConfigT]):
    """A command: its name in help, its config, and what loads the libraries and returns the work,
    or the check of it, which is given the problems of the command line.

    Calling it parses and runs; it leaves by SystemExit when anything went wrong.

    Example: `Command("openrlhf dpo", DPOConfig, load, load_check)`, made by `supervised("dpo")`.
    """

    name: str
    config_class: type[ConfigT]
    load: Callable[[ConfigT], Work]
    load_check: Callable[[ConfigT], Work] | None = None

    def __call__(self, argv: Sequence[str] | None = None, *, only_checks: bool = False) -> None:
        words = list(sys.argv[1:] if argv is None else argv)
        if asks := [index for index, word in enumerate(words) if word in ("-h", "--help")]:
            topic = takewhile(lambda word: not word.startswith("--"), words[asks[0] + 1 :])
            show_help(self, [*topic])
            return
        if "--version" in words:
            show(version_text())
            return
        from openrlhf.utils import stopping, threads  # noqa: PLC0415 - rich would slow --help

        is_debug = "--debug" in words
        try:
            with stopping.listening():
                words = [word for word in words if word != "--debug"]
                run(self, words, only_checks=only_checks)
        except OpenRLHFError as error:
            if is_debug:
                traceback.print_exc()
            elif error.user_traceback:
                print(error.user_traceback, file=sys.stderr)
            for line in str(error).splitlines():
                print(f"error: {line}", file=sys.stderr)
            if stopping.is_overdue():
                leave(error.exit_code)
            raise SystemExit(error.exit_code) from error
        except KeyboardInterrupt as error:
            if Topology.from_env().is_main:
                is_training = self.config_class.trains and not only_checks
                how = stopping.NOTHING_SAVED if is_training else ""
                if isinstance(error, stopping.Interrupted):  # a codec adds words to any other
                    how = str(error)
                print(f"error: interrupted: {how}".removesuffix(": "), file=sys.stderr)
            if stopping.is_overdue() or threads.is_any_busy():
                leave(130)
            raise SystemExit(130) from error
        except Exception as error:
            fault = machine_fault(error)
            if fault is None or is_debug:
                traceback.print_exc()
            if fault is not None:
                print(f"error: {fault}", file=sys.stderr)
            raise SystemExit(4 if fault is None else fault.exit_code) from error


def leave(exit_code: int) -> None:
    """End the process with no regard to threads, libraries and their own ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def imported(*names: str) -> Callable[[CommandConfig], Work]:
    """Return a loader of the function at `module:name`; further names are its first arguments.

    They are imported when a command runs, because --help must not import torch.
    """

    def load(config: CommandConfig) -> Work:
        function, *first = map(resolve_name, names)
        return partial(function, *first, config)

    return load


def supervised(name: str) -> Command[CommandConfig]:
    """Return the command of a supervised method."""
    method = METHODS[name]
    run = imported("openrlhf.commands.train_supervised:run_supervised", method.recipe)
    check = imported("openrlhf.commands.check:check_supervised", method.recipe)
    return Command(f"openrlhf {name}", method.config_class, run, check)


def run(command: Command[ConfigT], argv: Sequence[str], *, only_checks: bool = False) -> None:
    """Parse, move secrets into the environment and out of the arguments, load and work.

    A check goes on after problems; UNNAMED stands for a model or data set that is not named.
    """
    from openrlhf.utils.console import (  # noqa: PLC0415 - as above
        collected_warnings,
        notice,
        say_notices,
    )
    from openrlhf.utils.framework_logs import quiet_frameworks  # noqa: PLC0415 - as above
    from openrlhf.utils.progress import progress  # noqa: PLC0415 - as above
    from openrlhf.utils.threads import waiting_of_threads  # noqa: PLC0415 - as above

    quiet_frameworks()
    os.environ |= waiting_of_threads()
    parsed = read_config(command.config_class, argv, more_problems=start_problems)
    if parsed.problems and (parsed.config.use_ms or not only_checks):
        raise ConfigError(parsed.problems)
    os.environ.update(parsed.environment)
    for secret in filter(None, parsed.environment.values()):
        sys.argv = [word.replace(secret, "***") for word in sys.argv]
    is_main = Topology.from_env().is_main
    config = with_snapshots(parsed.config, is_shown=is_main)
    for leaf in config.unnamed():
        config = with_value(config, leaf.path, UNNAMED)
    load = command.load_check if only_checks else command.load
    assert load is not None, "cli/check.py names those that have one"
    with progress("loading libraries", is_shown=is_main):
        work = load(config)
    with collected_warnings() as warnings:
        if is_main:
            say_notices([*parsed.notices, *path_notices(config)])
        work(*[parsed.problems] * only_checks)
    if only_checks and is_main:
        told = f", but {len(warnings)} warning(s) above" if warnings else ""
        notice(f"\nno problem was found{told}")


def version_text() -> str:
    """Return the version, as `--version` prints it."""
    from importlib import metadata  # noqa: PLC0415 - it would slow --help

    return f"openrlhf {metadata.version('openrlhf')}"


def show_help(command: Command[ConfigT], words: Sequence[str]) -> None:
    """Print the help about `words`."""
    width = shutil.get_terminal_size().columns
    try:
        show(help_text(command.config_class, command.name, words, width=width))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def show(text: str) -> None:
    """Print a text; a reader such as `head` may have enough of it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # Python would complain once more when it closes its output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def start_problems(config: CommandConfig) -> Iterator[str]:
    """Yield a line for each file, library and room that is missing here and now."""
    if isinstance(config, RunConfig) and os.path.isdir(SHARED_MEMORY):
        disk = os.statvfs(SHARED_MEMORY)
        free = disk.f_bavail * disk.f_frsize
        if free < MIN_SHARED_MEMORY:
            yield (
                f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free, and processes share memory there. "
                "Remove old files in it, or give the container more (docker run --shm-size 8g)."
            )
    yield from library_problems(config)
    yield from path_problems(config)
    yield from weight_problems(config)
