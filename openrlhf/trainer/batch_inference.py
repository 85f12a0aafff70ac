"""batch_inference: answer prompts or score answers, row by row, into one file of JSON lines.

The order of the steps is the same for all tasks: read and check, share the work among the ranks,
keep what is done, and write all rows in input order at once. Knows nothing of engines and models.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from openrlhf.config.serving import BatchInferenceConfig, InferenceRewardConfig
from openrlhf.datasets.problems import Gathered
from openrlhf.distributed import collectives
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.topology import Topology
from openrlhf.models.kernels import check_here
from openrlhf.trainer.answer_parts import AnswerParts, check_writable, write_lines
from openrlhf.trainer.batch_generation import PromptTask, check_vllm
from openrlhf.trainer.batch_scoring import ScoreTask
from openrlhf.trainer.batch_task import BatchTask
from openrlhf.trainer.post_processors import best_answers, preference_pairs, rewards_in_prompts
from openrlhf.utils.gpus import check_gpus
from openrlhf.utils.logging import notice, redirect_framework_logs, say_notices
from openrlhf.utils.progress import hide_bars

Row = Any
TASKS: dict[str, type[BatchTask]] = {
    "generate_vllm": PromptTask,
    "generate": PromptTask,
    "rm": ScoreTask,
}


def run_batch_inference(config: BatchInferenceConfig) -> None:
    """Do the task and leave its rows at `config.output_path`.

    A killed run that is started again with the same settings and data goes on where it stopped.
    """
    assert config.eval_task is not None, "check_what_is_needed_is_named"
    assert config.output_path is not None, "check_what_is_needed_is_named"
    topology = Topology.from_env(local_rank=config.local_rank)
    output = Path(config.output_path)
    check_gpus()
    check_writable(output)
    gathered = Gathered()
    if config.eval_task != "generate_vllm":
        gathered.attempt(lambda: check_here(config.ds))
    gathered.attempt(lambda: check_vllm(config))
    redirect_framework_logs(output.parent, f"batch_inference-{topology.rank}")
    if not topology.is_main:
        hide_bars()  # one rank draws for all
    make = TASKS[config.eval_task]
    task = gathered.attempt(lambda: make(config))
    gathered.raise_if_any()
    assert task is not None, "or else problems were raised"
    strategy = DeepSpeedStrategy(
        config.ds.as_deepspeed(),
        seed=config.seed,
        full_determinism=config.full_determinism,
        local_rank=config.local_rank,
    )
    strategy.setup()
    parts = AnswerParts(output, rank=topology.rank)
    left = unfinished_items(task, parts, say=topology.is_main)
    if left:
        task.work(topology.shard(left), parts.add, strategy)
    collectives.barrier()
    if topology.is_main:
        write_output(task, parts, output)
    strategy.shut_down()


def unfinished_items(task: BatchTask, parts: AnswerParts, *, say: bool) -> list[int]:
    """The items without a part yet, the same on every rank."""
    left: list[int] = []
    if say:
        say_notices(task.notices)
        found = parts.prepare(task.key)
        if found:
            notice(found)
        done = parts.read()
        left = [index for index in task.items if index not in done]
    left = collectives.broadcast_object(left)
    parts.drop_torn_line()
    return left


def write_output(task: BatchTask, parts: AnswerParts, output: Path) -> None:
    """Put the rows in input order, through the post-processor, into the file; then clean up."""
    found = parts.read()
    rows = [
        {**columns, **row}
        for index in task.items
        for columns in [task.columns_of(index)]
        for row in found[index]
    ]
    kept, lines = post_process(rows, task.config.reward)
    # Dates and the like, which JSON does not know, become their text.
    write_lines(output, (json.dumps(row, ensure_ascii=False, default=str) for row in kept))
    for line in [*summary(rows), *lines]:
        notice(line)
    notice(f"{len(kept)} rows written to {output}")
    parts.remove()


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """What the rewards of scored rows are like."""
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
    """The rows to write, and what a person should know about the others."""
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
