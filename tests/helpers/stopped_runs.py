"""Commands that are stopped behind a checkpoint and typed again, and what of their logs is the same
whatever the clock says.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from openrlhf.distributed.checkpoints import Resumable, RunCheckpoints
from openrlhf.distributed.collectives import shut_down

CLOCKED = ("time", "timing", "token", "memory", "load_per_core", "goodput")


class Stop(BaseException):
    """Ends a command behind a checkpoint, as a kill would."""


@contextmanager
def stopping_behind(step: int) -> Iterator[None]:
    """End the command in the block once `step` was saved."""
    save = RunCheckpoints.save

    def save_and_stop(self: RunCheckpoints, run: Resumable) -> None:
        save(self, run)
        if run.global_step == step:
            self.wait_for_save()
            raise Stop

    RunCheckpoints.save = save_and_stop  # type: ignore[method-assign]
    try:
        with pytest.raises(Stop):
            yield
    finally:
        RunCheckpoints.save = save  # type: ignore[method-assign]
        shut_down()


def sums_of_states(run_dir: Path, step: int) -> dict[str, str]:
    """Return the SHA-256 sums of the files of tensors in a checkpoint."""
    files = json.loads((run_dir / f"ckpt/global_step{step}/manifest.json").read_text())["files"]
    return {name: value for name, value in files.items() if name.endswith(".pt")}


def records(run_dir: Path) -> list[dict]:
    """Return the log without what a clock decides; a torn last line is left out."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        {name: v for name, v in json.loads(line).items() if not name.startswith(CLOCKED)}
        for line in lines
        if line.endswith("}")
    ]
