"""The step beside which a checkpoint is written, against the other steps: `python -m
benchmarks.saving [--hidden_size 512]`.

`openrlhf sft` trains, and saves every fourth step. A step lasts from one call of `on_step_end` to
the next: what saving holds up of it is in it. For comparison, each save is waited for at once.
"""

import argparse
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.workload import Workload, digits

BATCH_SIZE = 16  # rows of a step: short beside the time that a checkpoint takes
NUM_STEPS, SAVE_STEPS = 25, 4
WARM_UP = 3  # steps


def step_times(folder: Path, model: Path, *, waits: bool) -> tuple[float, float, float]:
    """Return the median seconds of steps without a save and of those with one, and the GB of a
    checkpoint.
    """
    from openrlhf.api import sft
    from openrlhf.distributed.checkpoints import RunCheckpoints
    from openrlhf.utils.callbacks import Callback

    rows, ends = folder / "rows.jsonl", list[float]()
    numbers = range(BATCH_SIZE * NUM_STEPS)
    made = [{"prompt": digits(8, i), "completion": digits(120, -i)} for i in numbers]
    rows.write_text("".join(json.dumps(row) + "\n" for row in made))

    class Clock(Callback):
        """Notes when steps end."""

        def on_step_end(self, *args: object) -> None:
            ends.append(time.monotonic())

    save = RunCheckpoints.save

    def save_and_wait(self: RunCheckpoints, run: Any) -> None:
        save(self, run)
        if self.under_way is not None and self.under_way.thread is not None:
            self.under_way.thread.join()

    RunCheckpoints.save = save_and_wait if waits else save  # type: ignore[method-assign]
    sft(
        pretrain=str(model),
        dataset=str(rows),
        input_key="prompt",
        output_key="completion",
        max_len=1024,
        max_epochs=1,
        train_batch_size=BATCH_SIZE,
        micro_train_batch_size=BATCH_SIZE,
        use_dynamic_batch=True,
        train_max_tokens_per_gpu=2048,
        learning_rate=1e-6,
        save_steps=SAVE_STEPS,
        save_path=str(folder / "run"),
        ckpt_path=str(folder / "ckpt"),
        callbacks=[Clock()],
    )
    RunCheckpoints.save = save  # type: ignore[method-assign]
    seconds = {step: end - begin for step, (begin, end) in enumerate(pairwise(ends), 1)}
    # What follows step 4 holds its save.
    own = [s for step, s in seconds.items() if step > WARM_UP and step % SAVE_STEPS == 0]
    others = [s for step, s in seconds.items() if step > WARM_UP and step % SAVE_STEPS > 0]
    [*_, last] = (folder / "ckpt").glob("global_step*")
    num_bytes = sum(file.stat().st_size for file in last.rglob("*") if file.is_file())
    return statistics.median(others), statistics.median(own), num_bytes / 1e9


def main() -> None:
    """Print both ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden_size", type=int, default=512)
    size = parser.parse_args().hidden_size
    for waits in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            model = Workload(Path(folder), hidden_size=size).model
            step, own, num_gb = step_times(Path(folder), model, waits=waits)
        what = "waited for" if waits else "in the background"
        print(
            f"{num_gb:.2f} GB {what}: a step takes {step:.2f} s, beside a save {own:.2f} s, "
            f"{own / step:.2f} times as long"
        )


if __name__ == "__main__":
    main()
