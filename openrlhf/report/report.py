"""Writes `report.html` and `curves.png`: for `openrlhf report`, and at the end of each run."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from openrlhf.config.cli import save_resolved
from openrlhf.config.common import RunConfig
from openrlhf.errors import ConfigError, first_line
from openrlhf.report.run_folder import Run, read_runs
from openrlhf.utils.console import notice, warn
from openrlhf.utils.run_folder import (
    CONFIG_FILE,
    PICTURE_FILE,
    REPORT_FILE,
    holds_a_run,
    note_error,
)
from openrlhf.utils.threads import start_thread

TIMEOUT_S = 60.0  # that the end of a run waits for its report


def picture_path(output_path: Path) -> Path:
    """Return the path of the curves of a report: each report has its own picture. Raise
    ConfigError for a page that would have the name of its picture.
    """
    if output_path.suffix == ".png":
        raise ConfigError(f"--output {output_path} is a page. Type a name that ends in .html.")
    if output_path.name == REPORT_FILE:
        return output_path.with_name(PICTURE_FILE)
    return output_path.with_suffix(".png")


def write_report(run_dirs: Sequence[Path], output_path: Path) -> list[Run]:
    """Write the report of runs, and their curves as a PNG beside it; return the runs. Raise
    ConfigError for a folder that is no run.
    """
    # Heavy, and of no use before a run ends.
    from openrlhf.report.curves import make_panels  # noqa: PLC0415
    from openrlhf.report.page import make_page  # noqa: PLC0415
    from openrlhf.report.picture import draw_curves  # noqa: PLC0415

    picture = picture_path(output_path)
    runs = read_runs(run_dirs)
    panels = make_panels(runs)
    page, unfinished = make_page(runs, panels, is_served=False), output_path.with_suffix(".partial")
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(output_path)
        draw_curves(panels, picture)
    except OSError as error:
        raise ConfigError(
            f"{output_path} cannot be written ({error.strerror}). Type --output FILE."
        ) from error
    return runs


@contextmanager
def reporting(config: RunConfig, *, is_resumed: bool) -> Iterator[None]:
    """Write the report of the run that this block loads and trains, however it ends, and the error
    that ended it. While models load, only a failure is reported, and only in a folder that holds no
    other run; what is refused or interrupted leaves the folder as it was.
    """
    run_dir = Path(config.ckpt.output_dir)
    file = run_dir / CONFIG_FILE  # written once the models are loaded

    def written() -> int | None:
        return file.stat().st_mtime_ns if file.exists() else None

    before = written()
    try:
        yield
    except BaseException as error:
        is_failure = isinstance(error, Exception) and not isinstance(error, ConfigError)
        is_loading = written() in (None, before)
        if is_loading and is_failure and (is_resumed or not holds_a_run(run_dir)):
            with suppress(OSError):
                save_resolved(config, file)
        if written() not in (None, before):
            note_error(run_dir, error)
        raise
    finally:
        if written() not in (None, before):
            report_or_warn([run_dir], run_dir / REPORT_FILE)


def report_or_warn(run_dirs: Sequence[Path], path: Path) -> None:
    """Write a report, or warn that there is none: an error in it is none of the runs'."""
    failures: list[BaseException] = []
    write = partial(write_report, run_dirs, path)
    thread = start_thread("report", write, failures.append)
    thread.join(TIMEOUT_S)
    if failures or thread.is_alive():
        folders = shlex.join(map(str, run_dirs))
        reason = first_line(failures[0]) if failures else f"not done within {TIMEOUT_S:g} s"
        warn(f"{path} was not written ({reason}). Type: openrlhf report {folders}")
    else:
        notice(f"report: {path}")
