"""The names in a run folder, each defined here alone, and how a run ended.

A run folder is what `--save_path` names: the model, the records of the run, and `logs`.
"""

import json
from pathlib import Path
from typing import Any

from openrlhf.errors import first_line
from openrlhf.utils.console import warn

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"  # the resolved settings
ROLLOUTS = "rollouts"  # samples of steps and evaluations, as parquet
IMAGES = "images"  # in its folder, those of samples, once each: <sha256>.png
DUMPS = "dumps"  # steps that can be replayed
LOGS = "logs"  # a file of each process
REPORT_FILE = "report.html"
PICTURE_FILE = "curves.png"
BAD_ROWS_FILE = "bad_rows.jsonl"  # that --bad_rows skip left out
ENDED_FILE = "ended.json"  # how a run ended: step and data of a finished one, else its error
HOLDER_FILE = "running.json"  # the process that writes here now
POLICY = "policy"  # weights of an adapter's run beside the adapter
RECORDS = (
    CONFIG_FILE,
    METRICS_FILE,
    ROLLOUTS,
    DUMPS,
    REPORT_FILE,
    PICTURE_FILE,
    BAD_ROWS_FILE,
    ENDED_FILE,
)


def note_error(run_dir: Path, error: BaseException) -> None:
    """Note by which error a run ended; a full disk costs the note."""
    text = f"{type(error).__name__}: {first_line(error)}"
    try:
        (run_dir / ENDED_FILE).write_text(json.dumps({"error": text}))
    except OSError as problem:
        warn(f"{ENDED_FILE} cannot be written to {run_dir} ({problem})")


def read_ending(run_dir: Path) -> dict[str, Any] | None:
    """Return the end of a run, or None if it goes on, was killed, or is none."""
    try:
        return json.loads((run_dir / ENDED_FILE).read_text())
    except (OSError, ValueError):
        return None


def holds_a_run(folder: Path) -> bool:
    """Return True if a run left records in a folder. One that failed while its models loaded left
    none, only its error.
    """
    ended = read_ending(folder)
    if ended is not None and "error" in ended:
        names: tuple[str, ...] = (METRICS_FILE, ROLLOUTS, DUMPS)
    else:
        names = (METRICS_FILE, ENDED_FILE)
    return any((folder / name).exists() for name in names)
