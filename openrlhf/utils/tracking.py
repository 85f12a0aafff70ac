"""Where metrics and rollouts go: metrics.jsonl, TensorBoard and wandb when asked, parquet.

No sink can stop or slow a training run: the files of the run folder warn once and go on, the extra
sinks live behind a bounded queue in a thread of their own, with everything they do, start included.
Nothing here knows what a metric means.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from openrlhf.utils.logging import warn

if TYPE_CHECKING:
    from openrlhf.config.common import LoggerConfig

METRICS_FILE = "metrics.jsonl"
QUEUE_SIZE = 256  # log calls a sink may lag behind before it is given up
CLOSE_TIMEOUT_S = 15.0


class Tracker(Protocol):
    """A sink of metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Note the metrics of one step."""

    def close(self) -> None:
        """Write out what is pending; no further call follows."""


class NullTracker:
    """Keeps nothing: for ranks that do not log, and for tests."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _Tolerate:
    """A block whose failure costs the record, not the run; `error` keeps it for one warning."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> _Tolerate:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self.error = error
        return isinstance(error, Exception)


def _describe(error: BaseException) -> str:
    """One line of an exception: its type and the first line of its text."""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}"


def _strict_json(value: object) -> object:
    """NaN and infinities are no JSON: null. Scalar tensors and numpy numbers become numbers."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int) else str(value)


def read_metrics(path: Path | str) -> list[dict[str, float]]:
    """The records of a metrics.jsonl; a line torn by a crash is left out."""
    records = []
    for line in Path(path).read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


class JsonlTracker:
    """One JSON object a step in `metrics.jsonl`: `{"step": 3, "time": 1.7e9, "reward": 0.5, ...}`.

    `resume_step` is the step of the checkpoint a run goes on from: later records of the run before
    are dropped, so that steps never appear twice.
    """

    def __init__(self, run_dir: Path | str, *, resume_step: int | None = None) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self.num_lost = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None and self.path.exists():
            self._take_over(resume_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line; a full disk costs the line and one warning."""
        record: dict[str, object] = {"step": step, "time": round(time.time(), 3)}
        record.update({name: _strict_json(value) for name, value in values.items()})
        line = json.dumps(record)
        try:
            with self.path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            self.num_lost += 1
            if self.num_lost == 1:
                warn(f"metrics cannot be written to {self.path} ({error}); training goes on.")

    def close(self) -> None:
        """Nothing is pending: every line was written when it came."""

    def _take_over(self, resume_step: int) -> None:
        kept = [record for record in read_metrics(self.path) if record["step"] <= resume_step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        partial.replace(self.path)


class TensorBoardTracker:
    """Scalars for TensorBoard in `log_dir`."""

    def __init__(self, log_dir: Path | str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - heavy, optional

        self.writer = SummaryWriter(str(log_dir))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add every value as a scalar at `step`."""
        for name, value in values.items():
            self.writer.add_scalar(name, float(value), step)
        self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self.writer.close()


class WandbTracker:
    """Metrics and configuration in Weights & Biases; the API key comes from the environment."""

    def __init__(self, logger: LoggerConfig, run_dir: Path | str, config: Mapping) -> None:
        import wandb  # noqa: PLC0415 - heavy, optional

        settings = logger.wandb
        self.run = wandb.init(
            entity=settings.org,
            project=settings.project,
            group=settings.group,
            name=settings.run_name,
            dir=str(run_dir),
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one record; `step` is a metric, so that a resumed run may go back."""
        self.run.log({"step": step, **values})

    def close(self) -> None:
        """Upload the rest."""
        self.run.finish()


class BackgroundTracker:
    """Another tracker, made, fed and closed in a daemon thread; given up if it fails or hangs.

    `make_sink` runs in the thread as well, since a sink may hang while it connects.
    """

    def __init__(
        self, name: str, make_sink: Callable[[], Tracker], *, queue_size: int = QUEUE_SIZE
    ) -> None:
        self.name = name
        self.num_lost = 0
        self._make_sink = make_sink
        self._is_given_up = False
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(queue_size)
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand the metrics over without waiting."""
        self._offer((step, dict(values)))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let the sink finish for at most `timeout_s`, then leave it."""
        self._offer(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._give_up(f"did not finish within {timeout_s:g} s")

    def _offer(self, item: tuple[int, dict[str, float]] | None) -> None:
        if self._is_given_up:
            self.num_lost += 1
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.num_lost += 1
            self._give_up(f"hangs with {self._queue.qsize()} records waiting")

    def _give_up(self, reason: str) -> None:
        if not self._is_given_up:
            self._is_given_up = True
            warn(f"{self.name} {reason}; it gets no more metrics, training goes on.")

    def _run(self) -> None:
        with _Tolerate() as outcome:
            sink = self._make_sink()
            while (item := self._queue.get()) is not None:
                sink.log(*item)
            sink.close()
        if outcome.error is not None:
            self._give_up(f"failed ({_describe(outcome.error)})")


class MultiTracker:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand the metrics to each."""
        for tracker in self.trackers:
            tracker.log(step, values)

    def close(self) -> None:
        """Close each."""
        for tracker in self.trackers:
            tracker.close()


def make_tracker(
    logger: LoggerConfig, run_dir: Path | str, config: Mapping, *, resume_step: int | None = None
) -> Tracker:
    """The trackers a run asked for, as one; `config` is the resolved tree as nested dicts."""
    trackers: list[Tracker] = [JsonlTracker(run_dir, resume_step=resume_step)]
    if logger.tensorboard_dir:
        # One folder a run, for comparisons.
        log_dir = Path(logger.tensorboard_dir) / logger.wandb.run_name.lstrip("/")
        trackers.append(BackgroundTracker("TensorBoard", lambda: TensorBoardTracker(log_dir)))
    if logger.wandb.key:
        trackers.append(BackgroundTracker("wandb", lambda: WandbTracker(logger, run_dir, config)))
    return MultiTracker(trackers)


class RolloutWriter:
    """Samples as parquet, one file a step: `rollouts/step_000001.parquet`, one row a sample.

    Rows may differ in their columns; a missing one is null. Values parquet has no common type for
    are written as JSON text. A full disk costs the file and one warning. The files of the last
    `num_kept` steps stay.
    """

    def __init__(self, run_dir: Path | str, *, num_kept: int) -> None:
        self.folder = Path(run_dir) / "rollouts"
        self.num_kept = num_kept
        self.num_lost = 0

    def write(self, step: int, rows: Sequence[Mapping[str, object]]) -> Path | None:
        """Write one step's samples over an earlier attempt's; answers the file, or None if lost."""
        import pyarrow.parquet  # noqa: PLC0415 - heavy

        path = self._path(step)
        partial = path.with_suffix(".partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(_as_table(rows), partial)
            partial.replace(path)
            self._path(step - self.num_kept).unlink(missing_ok=True)
        except OSError as error:
            self.num_lost += 1
            if self.num_lost == 1:
                warn(f"rollouts cannot be written to {self.folder} ({error}); training goes on.")
            return None
        return path

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.parquet"


def _as_table(rows: Sequence[Mapping[str, object]]) -> object:
    """A pyarrow table of the union of the rows' columns, in the order of first appearance."""
    import pyarrow  # noqa: PLC0415 - heavy

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [_plain(row.get(name)) for row in rows] for name in names}
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pyarrow.array(values)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):
            texts = [None if v is None else json.dumps(v, default=str) for v in values]
            arrays[name] = pyarrow.array(texts, pyarrow.string())
    return pyarrow.table(arrays)


def _plain(value: object) -> object:
    """Tensors and arrays as lists; an empty mapping as null, since parquet has no empty struct."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value) or None
    return value
