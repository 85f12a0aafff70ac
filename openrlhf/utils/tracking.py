"""Where metrics and rollouts go: metrics.jsonl, other trackers when asked, parquet.

No sink can stop or slow a training run: the files of the run folder warn once and go on, the extra
sinks live behind a bounded queue in a thread of their own, with everything they do, start included.
Nothing here knows what a metric means.
"""

import json
import math
import queue
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

from openrlhf.config.cli import leaves
from openrlhf.config.common import LoggerConfig, WandbConfig
from openrlhf.errors import first_line
from openrlhf.utils.logging import warn, warn_once
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.threads import start_thread

Record: TypeAlias = tuple[int, dict[str, float]]  # step, metrics
Reader: TypeAlias = Callable[[Iterator[Record]], None]

METRICS_FILE = "metrics.jsonl"
BAD_ROWS_FILE = "bad_rows.jsonl"  # that --bad_rows skip left out
ENDED_FILE = "ended.json"  # how a run ended: step and data of a finished one, else its error
MLFLOW_BATCH = 100  # settings that its servers take at a time
MLFLOW_NO_NAME = re.compile(r"[^\w\-./ ]")  # what its names of metrics may not have
QUEUE_SIZE = 256  # log calls a sink may lag behind before it is given up
CLOSE_TIMEOUT_S = 15.0  # for a sink to write out what is pending


def read_metrics(path: Path | str) -> list[dict[str, float]]:
    """Return the records of a metrics.jsonl; a line torn by a crash is left out."""
    records = []
    for line in Path(path).read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def note_error(run_dir: Path, error: BaseException) -> None:
    """Note by which error a run ended; a full disk costs the note."""
    text = f"{type(error).__name__}: {first_line(error)}"
    try:
        (run_dir / ENDED_FILE).write_text(json.dumps({"error": text}))
    except OSError as problem:
        warn(f"{ENDED_FILE} cannot be written to {run_dir} ({problem})")


def read_ending(run_dir: Path) -> dict[str, Any] | None:
    """Return how a run ended, or None if it goes on, was killed, or is none."""
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
        names: tuple[str, ...] = (METRICS_FILE, "rollouts", "dumps")
    else:
        names = (METRICS_FILE, ENDED_FILE)
    return any((folder / name).exists() for name in names)


class Tracker:
    """One JSON object a step in `metrics.jsonl`: `{"step": 3, "time": 1.7e9, "reward": 0.5, ...}`;
    the same to further sinks.

    `resume_step` is the step of the checkpoint a run goes on from: later records and samples of the
    run before are dropped, so that steps never appear twice.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        resume_step: int | None = None,
        sinks: "Sequence[BackgroundSink]" = (),
    ) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self.sinks = sinks
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None and self.path.exists():
            kept = [record for record in self.records() if record["step"] <= resume_step]
            unfinished = self.path.with_suffix(".partial")
            unfinished.write_text("".join(json.dumps(record) + "\n" for record in kept))
            unfinished.replace(self.path)
        if resume_step is not None:
            for path in (self.path.parent / "rollouts").glob("*.parquet"):
                number = path.stem.rpartition("_")[2]
                if number.isdecimal() and int(number) > resume_step:
                    path.unlink()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line; a full disk costs the line and one warning."""
        for sink in self.sinks:
            sink.offer((step, dict(values)))
        # NaN and infinities are no JSON.
        numbers = {name: v if math.isfinite(v) else None for name, v in values.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **numbers})
        try:
            with self.path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            warn_once(f"metrics cannot be written to {self.path} ({error}); training goes on.")

    def records(self) -> list[dict[str, float]]:
        """Return everything that was logged of the run."""
        return read_metrics(self.path) if self.path.exists() else []

    def close(self) -> None:
        """Let the sinks write out what is pending; no further call follows."""
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


class BackgroundSink:
    """A function that reads records until they end, in a daemon thread; given up if it fails or
    hangs.
    """

    def __init__(self, name: str, read: Reader, *, queue_size: int = QUEUE_SIZE) -> None:
        self.name = name
        self._is_given_up = False
        self._queue: queue.Queue[Record | None] = queue.Queue(queue_size)
        self._thread = start_thread(
            f"tracker-{name}",
            lambda: read(iter(self._queue.get, None)),
            lambda error: self._give_up(f"failed ({type(error).__name__}: {first_line(error)})"),
        )

    def offer(self, record: Record | None) -> None:
        """Hand a record over without waiting; None is the end."""
        if self._is_given_up:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._give_up(f"hangs with {self._queue.qsize()} records waiting")

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let the sink finish for at most `timeout_s`, then leave it."""
        self.offer(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._give_up(f"did not finish within {timeout_s:g} s")

    def _give_up(self, reason: str) -> None:
        if not self._is_given_up:
            self._is_given_up = True
            warn(f"{self.name} {reason}; it gets no more metrics, training goes on.")


def write_tensorboard(records: Iterator[Record], log_dir: Path) -> None:
    """Add every value as a scalar to an event file in `log_dir`."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - heavy, optional

    with SummaryWriter(str(log_dir)) as writer:
        for step, values in records:
            for name, value in values.items():
                writer.add_scalar(name, float(value), step)
            writer.flush()


def write_wandb(
    records: Iterator[Record], settings: WandbConfig, run_dir: Path | str, config: Mapping
) -> None:
    """Send records and config to Weights & Biases; the API key comes from the environment."""
    import wandb  # noqa: PLC0415 - heavy, optional

    run = wandb.init(
        entity=settings.org,
        project=settings.project,
        group=settings.group,
        name=settings.run_name,
        dir=str(run_dir),
        config=dict(config),
        settings=wandb.Settings(silent=True, console="off"),
    )
    run.define_metric("*", step_metric="step")
    for step, values in records:  # the step is a metric, so that a resumed run may go back
        run.log({"step": step, **values})
    run.finish()


def write_trackio(
    records: Iterator[Record], settings: WandbConfig, config: Mapping, library: Any = None
) -> None:
    """Send records and config to trackio, which keeps them on this machine unless its own variables
    name a server.
    """
    trackio = library or import_module("trackio")
    run = trackio.init(
        project=settings.project,
        name=settings.run_name,
        group=settings.group,
        config=dict(config),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    for step, values in records:
        run.log(values, step=step)
    run.finish()


def write_mlflow(
    records: Iterator[Record], settings: WandbConfig, config: Mapping, library: Any = None
) -> None:
    """Send records and config to MLflow, whose variables name the server."""
    mlflow = library or import_module("mlflow")
    mlflow.set_experiment(settings.project)
    params = list(leaves(config))
    with mlflow.start_run(run_name=settings.run_name):
        for first in range(0, len(params), MLFLOW_BATCH):
            mlflow.log_params(dict(params[first : first + MLFLOW_BATCH]))
        for step, values in records:
            named = {MLFLOW_NO_NAME.sub("_", name): value for name, value in values.items()}
            mlflow.log_metrics(named, step=step)


def make_tracker(
    logger: LoggerConfig, run_dir: Path | str, config: Mapping, *, resume_step: int | None = None
) -> Tracker:
    """Return the tracker a run asked for; `config` is the resolved tree as nested dicts."""
    sinks = []
    if logger.tensorboard_dir:
        # One folder a run, for comparisons.
        log_dir = Path(logger.tensorboard_dir) / logger.wandb.run_name.lstrip("/")
        sinks.append(BackgroundSink("TensorBoard", partial(write_tensorboard, log_dir=log_dir)))
    if logger.wandb.key:
        write = partial(write_wandb, settings=logger.wandb, run_dir=run_dir, config=config)
        sinks.append(BackgroundSink("wandb", write))
    others = {"trackio": write_trackio, "MLflow": write_mlflow}
    for name, other in others.items():
        if getattr(logger, name.lower()):
            read = partial(other, settings=logger.wandb, config=config)
            sinks.append(BackgroundSink(name, read))
    return Tracker(run_dir, resume_step=resume_step, sinks=sinks)


TextsOf = Callable[[Sequence[int]], Sequence[str]]  # of tokens


def rollout_row(rollout: Rollout) -> dict[str, object]:
    """Return a sample as a row of a file of rollouts; lists have a value for each token of the
    whole sequence, or for each sampled one.
    """
    versions = rollout.weight_versions
    return rollout.extra_columns | {
        "sample_id": rollout.sample_id,
        "row": rollout.row_id + 1,
        "group_id": rollout.group_id,
        "episode_id": rollout.episode_id,
        "datasource": rollout.datasource,
        "prompt": rollout.prompt_text,
        "response": rollout.response_text,
        "label": rollout.label,
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "score": rollout.score,
        "finish_reason": rollout.finish_reason,
        "num_actions": rollout.num_actions,
        "weight_version": int(versions[-1]),
        "token_ids": rollout.token_ids.numpy(),
        "action_mask": rollout.action_mask.numpy(),
        "logprobs": rollout.logprobs.numpy(),
        "weight_versions": versions.numpy(),
    }


def write_rollouts(
    run_dir: Path | str,
    step: int,
    rows: Sequence[Mapping[str, object]],
    *,
    num_kept: int,
    kind: Literal["step", "eval_step"] = "step",
    token_texts: TextsOf | None = None,
) -> Path | None:
    """Write one step's samples as parquet, one row a sample, over an earlier attempt's:
    `rollouts/step_000001.parquet`, those of an evaluation `rollouts/eval_step_000001.parquet`.
    Return the file, or None where a full disk lost it, which is said once. The last `num_kept`
    files of each kind stay.

    Rows may differ in their columns; a missing one is null. Values parquet has no common type for
    are written as JSON text. `token_texts` returns the text of each token: it makes the column of
    that name beside `token_ids`.
    """
    import pyarrow.parquet  # noqa: PLC0415 - heavy

    folder = Path(run_dir) / "rollouts"
    path = folder / f"{kind}_{step:06d}.parquet"
    unfinished = path.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(_as_table(rows, token_texts), unfinished)
        unfinished.replace(path)
        earlier = [other for other in folder.glob(f"{kind}_*.parquet") if other <= path]
        for other in sorted(earlier)[:-num_kept]:
            other.unlink()
    except OSError as error:
        warn_once(f"rollouts cannot be written to {folder} ({error}); training goes on.")
        return None
    return path


def _as_table(rows: Sequence[Mapping[str, object]], token_texts: TextsOf | None) -> object:
    """Return a pyarrow table of all columns of the rows, in the order of first appearance."""
    import pyarrow  # noqa: PLC0415 - heavy

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [_plain(row.get(name)) for row in rows] for name in names}
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError, UnicodeError):
            texts = [None if v is None else json.dumps(v, default=str) for v in values]
            arrays[name] = pyarrow.array(texts, pyarrow.string())
    if token_texts is not None and (ids := arrays.get("token_ids")) is not None:
        tokens = ids.values.dictionary_encode()  # the text of each token is looked up once
        texts = pyarrow.array(token_texts(tokens.dictionary.to_pylist()), pyarrow.string())
        values = pyarrow.DictionaryArray.from_arrays(tokens.indices, texts)
        arrays["token_texts"] = pyarrow.ListArray.from_arrays(ids.offsets, values)
    return pyarrow.table(arrays)


def _plain(value: object) -> object:
    """Return tensors as lists, and an empty mapping as None: parquet has no empty struct."""
    if hasattr(value, "__array_interface__") and getattr(value, "ndim", 0) == 1:
        return value  # of numpy, which pyarrow reads faster than a list
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value) or None
    return value
