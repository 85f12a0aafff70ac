"""Where metrics go: metrics.jsonl in the run folder, and other trackers when asked.

No sink can stop a run: a full disk costs a line and one warning. Nothing here knows what a metric
means.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from openrlhf.config.common import LoggerConfig
from openrlhf.utils.console import warn_once
from openrlhf.utils.run_folder import METRICS_FILE, ROLLOUTS
from openrlhf.utils.sinks import (
    BackgroundSink,
    write_mlflow,
    write_tensorboard,
    write_trackio,
    write_wandb,
)


def read_metrics(path: Path | str) -> list[dict[str, float]]:
    """Return the records of a metrics.jsonl; a line torn by a crash is left out."""
    records = []
    for line in Path(path).read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


class Tracker:
    """One JSON object a step in `metrics.jsonl`: `{"step": 3, "time": 1.7e9, "reward": 0.5, ...}`;
    the same to further sinks.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        sinks: "Sequence[BackgroundSink]" = (),
    ) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self.sinks = sinks
        self._rewound_to: int | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def rewind(self, step: int) -> None:
        """Drop the records and samples of steps after the checkpoint that a run goes on from, which
        come again. Of this step itself some
        records may, those that came after the checkpoint: they replace the first ones.
        """
        self._rewound_to = step
        self._keep(lambda record: record["step"] <= step)
        for path in (self.path.parent / ROLLOUTS).glob("*.parquet"):
            number = path.stem.rpartition("_")[2]
            if number.isdecimal() and int(number) > step:
                path.unlink()

    def _keep(self, is_kept: Callable[[Mapping[str, float]], bool]) -> None:
        if self.path.exists():
            lines = [json.dumps(record) + "\n" for record in self.records() if is_kept(record)]
            unfinished = self.path.with_suffix(".partial")
            with self._going_on():
                unfinished.write_text("".join(lines))
                unfinished.replace(self.path)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Turn an error of the disk in the block into one warning; training goes on."""
        try:
            yield
        except OSError as error:
            warn_once(f"metrics cannot be written to {self.path} ({error}); training goes on.")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line; a full disk costs the line and one warning."""
        for sink in self.sinks:
            sink.offer((step, dict(values)))
        if step == self._rewound_to:
            self._keep(lambda record: record["step"] != step or not record.keys() & values.keys())
        # NaN and infinities are no JSON.
        numbers = {name: v if math.isfinite(v) else None for name, v in values.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **numbers})
        with self._going_on(), self.path.open("a") as file:
            file.write(line + "\n")

    def records(self) -> list[dict[str, float]]:
        """Return everything that was logged of the run."""
        return read_metrics(self.path) if self.path.exists() else []

    def close(self) -> None:
        """Let the sinks write out what is pending; they take nothing more."""
        for sink in self.sinks:
            sink.close()


class NullTracker(Tracker):
    """Keeps nothing: for ranks that do not log, and for tests."""

    def __init__(self) -> None:
        self.sinks = ()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def records(self) -> list[dict[str, float]]:
        """Return nothing."""
        return []


def make_tracker(
    logger: LoggerConfig, run_dir: Path | str, config: Mapping, *, resume_step: int | None = None
) -> Tracker:
    """Return the tracker a run asked for; `config` is the resolved tree as nested dicts, and
    `resume_step` the one a run goes on from.
    """
    sinks = []
    if logger.tensorboard_dir:
        # One folder a run, for comparisons.
        log_dir = Path(logger.tensorboard_dir) / logger.wandb.run_name.lstrip("/")
        write_events = partial(write_tensorboard, log_dir=log_dir, resume_step=resume_step)
        sinks.append(BackgroundSink("TensorBoard", write_events))
    if logger.wandb.key:
        write = partial(write_wandb, settings=logger.wandb, run_dir=run_dir, config=config)
        sinks.append(BackgroundSink("wandb", write))
    others = {"trackio": write_trackio, "MLflow": write_mlflow}
    for name, other in others.items():
        if getattr(logger, name.lower()):
            read = partial(other, settings=logger.wandb, config=config)
            sinks.append(BackgroundSink(name, read))
    return Tracker(run_dir, sinks=sinks)
