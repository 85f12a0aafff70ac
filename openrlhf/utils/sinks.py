"""TensorBoard, wandb, trackio and MLflow: each reads records in a daemon thread behind a bounded
queue, start included, so that none can stop or slow a run.
"""

import queue
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from openrlhf.config.cli import leaves
from openrlhf.config.common import WandbConfig
from openrlhf.errors import first_line
from openrlhf.utils.console import warn
from openrlhf.utils.threads import start_thread

Record: TypeAlias = tuple[int, dict[str, float]]  # step, metrics

Reader: TypeAlias = Callable[[Iterator[Record]], None]

MLFLOW_BATCH = 100  # settings that its servers take at a time

MLFLOW_NO_NAME = re.compile(r"[^\w\-./ ]")  # what its names of metrics may not have

QUEUE_SIZE = 256  # log calls a sink may lag behind before it is given up

CLOSE_TIMEOUT_S = 15.0  # for a sink to write out what is pending


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
        self._is_given_up = True  # steps may be made again, whose records it has

    def _give_up(self, reason: str) -> None:
        if not self._is_given_up:
            self._is_given_up = True
            warn(f"{self.name} {reason}; it gets no more metrics, training goes on.")


def write_tensorboard(
    records: Iterator[Record], log_dir: Path, resume_step: int | None = None
) -> None:
    """Add every value as a scalar to an event file in `log_dir`; what earlier files have of steps
    after `resume_step` is shown no more.
    """
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - heavy, optional

    purge_step = None if resume_step is None else resume_step + 1
    with SummaryWriter(str(log_dir), purge_step=purge_step) as writer:
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


def write_trackio(records: Iterator[Record], settings: WandbConfig, config: Mapping) -> None:
    """Send records and config to trackio, which keeps them on this machine unless its own variables
    name a server.
    """
    trackio = import_module("trackio")
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


def write_mlflow(records: Iterator[Record], settings: WandbConfig, config: Mapping) -> None:
    """Send records and config to MLflow, whose variables name the server."""
    mlflow = import_module("mlflow")
    mlflow.set_experiment(settings.project)
    params = list(leaves(config))
    with mlflow.start_run(run_name=settings.run_name):
        for first in range(0, len(params), MLFLOW_BATCH):
            mlflow.log_params(dict(params[first : first + MLFLOW_BATCH]))
        for step, values in records:
            named = {MLFLOW_NO_NAME.sub("_", name): value for name, value in values.items()}
            mlflow.log_metrics(named, step=step)
