"""batch_inference: respond to prompts or score responses, row by row, into one file of JSON lines.

The order of the steps is the same for all tasks: read and check, share the work among the ranks,
keep what is done in `<output>.parts/`, and write all rows in input order at once.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf.config.serving import BatchInferenceConfig, InferenceRewardConfig
from openrlhf.datasets.problems import Gathered
from openrlhf.distributed import collectives
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.topology import Topology
from openrlhf.models.support import check_here
from openrlhf.serving.batch_tasks import BatchTask, PromptTask, Rows, ScoreTask, check_vllm
from openrlhf.serving.post_processors import best_answers, preference_pairs, rewards_in_prompts
from openrlhf.utils.gpus import check_gpus
from openrlhf.utils.logging import notice, redirect_framework_logs, say_notices
from openrlhf.utils.progress import hide_bars

Row = Any
KEY_FILE = "key.json"


def run_batch_inference(config: BatchInferenceConfig) -> None:
    """Do the task and leave its rows at `config.output_path`.

    A killed run that is started again with the same settings and data goes on where it stopped.
    """
    assert config.output_path is not None, "an output is needed"
    topology = Topology.from_env(local_rank=config.local_rank)
    output = Path(config.output_path)
    check_gpus()
    output.parent.mkdir(parents=True, exist_ok=True)
    gathered = Gathered()
    if config.eval_task != "generate_vllm":
        gathered.attempt(lambda: check_here(config.ds, trains=False))
    gathered.attempt(lambda: check_vllm(config))
    redirect_framework_logs(output.parent, f"batch_inference-{topology.rank}")
    if not topology.is_main:
        hide_bars()  # one rank draws for all
    make: type[BatchTask] = ScoreTask if config.eval_task == "rm" else PromptTask
    task = gathered.attempt(lambda: make(config))
    gathered.raise_if_any()
    assert task is not None, "or else problems were raised"
    strategy = DeepSpeedStrategy(
        config.ds,
        seed=config.seed,
        full_determinism=config.full_determinism,
        local_rank=config.local_rank,
    )
    strategy.setup()
    parts = Parts(output, rank=topology.rank)
    left = unfinished_items(task, parts, say=topology.is_main)
    if left:
        task.work(topology.shard(left), parts.add, strategy)
    collectives.barrier()
    if topology.is_main:
        write_output(task, parts, output)
    strategy.shut_down()


class Parts:
    """The finished items of one output file on disk, a file for each rank; `prepare` is called by
    one rank before the others look. All ranks must see the folder.
    """

    def __init__(self, output: Path, *, rank: int) -> None:
        self.folder = Path(f"{output}.parts")
        self._file = self.folder / f"rank{rank}.jsonl"

    def prepare(self, key: str) -> None:
        """Keep parts with the same key, throw others away; tell the user."""
        key_file = self.folder / KEY_FILE
        if key_file.exists() and json.loads(key_file.read_text()) == key:
            notice(f"going on with what is done in {self.folder}")
            return
        if any(self.folder.glob("rank*.jsonl")):
            notice(f"{self.folder} belongs to other settings or data: starting anew")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        write_lines(key_file, [json.dumps(key)])

    def read(self) -> dict[int, Rows]:
        """Return the rows of every finished item, whichever rank did it."""
        found: dict[int, Rows] = {}
        for path in sorted(self.folder.glob("rank*.jsonl")):
            whole, _, _ = path.read_bytes().rpartition(b"\n")  # a killed process may leave half
            found.update(map(json.loads, whole.splitlines()))
        return found

    def drop_torn_line(self) -> None:
        """Cut off what a killed process left half written in this rank's file."""
        if self._file.exists():
            whole = self._file.read_bytes().rpartition(b"\n")
            os.truncate(self._file, len(whole[0]) + len(whole[1]))

    def add(self, results: Mapping[int, Rows]) -> None:
        """Note finished items; they survive the process from here on."""
        with self._file.open("a", encoding="utf-8") as file:
            for index, rows in results.items():
                file.write(json.dumps([index, rows]) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Clean up once the output is written."""
        shutil.rmtree(self.folder)


def unfinished_items(task: BatchTask, parts: Parts, *, say: bool) -> list[int]:
    """Return the items without a part yet, the same on every rank."""
    left: list[int] = []
    if say:
        say_notices(task.samples.notices)
        parts.prepare(task.key)
        done = parts.read()
        left = [index for index in task.items if index not in done]
    left = collectives.broadcast_object(left)
    parts.drop_torn_line()
    return left


def write_output(task: BatchTask, parts: Parts, output: Path) -> None:
    """Put the rows in input order, through the post-processor, into the file; then clean up."""
    found = parts.read()
    rows = [{**task.columns_of(item), **row} for item in task.items for row in found[item]]
    kept, lines = post_process(rows, task.config.reward)
    # Dates and the like, which JSON does not know, become their text.
    write_lines(output, (json.dumps(row, ensure_ascii=False, default=str) for row in kept))
    for line in [*summary(rows), *lines]:
        notice(line)
    notice(f"{len(kept)} rows written to {output}")
    parts.remove()


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Describe the rewards of scored rows."""
    rewards = [row["reward"] for row in rows if "reward" in row]
    if rewards:
        mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
        yield (
            f"rewards of {len(rewards)} answers: mean {mean:.3f}, standard deviation {spread:.3f}, "
            f"from {min(rewards):.3f} to {max(rewards):.3f}"
        )


def post_process(
    rows: Sequence[Row], reward: InferenceRewardConfig
) -> tuple[Sequence[Row], list[str]]:
    """Return the rows to write, and what a person should know about the others."""
    if reward.post_processor == "rs":
        return best_answers(rows), []
    if reward.post_processor == "iter_dpo":
        pairs, num_equal = preference_pairs(rows)
        line = f"{num_equal} prompts were left out: their best and worst answers score the same"
        return pairs, [line] if num_equal else []
    if reward.post_processor == "csft":
        normalize = reward.normalize_enable
        return rewards_in_prompts(rows, reward.template, normalize=normalize), []
    return rows, []


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file that is there whole or not at all, whatever happens meanwhile."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
