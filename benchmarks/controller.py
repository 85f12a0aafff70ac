"""The controller's part of an RL step against samples and ranks: `python -m benchmarks.controller`.

Groups are stubs that take their shares and return columns of the right size at once, so that what
is measured is the controller alone: it lays samples end to end, cuts shares, puts results back in
order, computes advantages and plans updates. Samples have 1,024 tokens, 896 of them sampled, as in
GRPO with a reference. What it takes to cut and pickle the shares of a step is measured afterwards.
"""

import argparse
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.commands.train_rl import forwards_of
from openrlhf.config.ppo import PPOConfig
from openrlhf.trainer.ppo_updates import StepInputs, start_update
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import make_experience
from openrlhf.trainer.ppo_utils.update_plan import (
    UpdateResult,
    num_updates_per_rollout,
    seen_column,
)
from openrlhf.trainer.ppo_utils.worker_group import Forward, Pending, WorkerGroup
from openrlhf.utils.memory import collecting_only_new_objects, keep_freed_memory
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout

NUM_PROMPT, NUM_TOKENS = 128, 1024
NUM_ACTIONS = NUM_TOKENS - NUM_PROMPT
SAMPLES_A_PROMPT = 8
BATCH_SIZE = 1024  # of an optimizer step
NUM_TIMED = 20_000  # samples of the steps that are timed, at least; three steps or more


class StubGroup(WorkerGroup):
    """Ranks that compute nothing."""

    def __init__(self, num_ranks: int, num_samples: int) -> None:
        self.num_shares = num_ranks
        # Ray has put results somewhere.
        self.column = np.zeros(NUM_ACTIONS * num_samples, np.float32)
        self.own_s = 0.0  # that making results took, which is no work of the controller

    def start(self, method: Callable[..., Any], shares: Iterable[tuple[Any, ...]]) -> Pending:
        """Take every share, and let it go."""
        results, clock = [], time.perf_counter
        for share in shares:
            start = clock()
            results.append(self.result(*share))
            self.own_s += clock() - start
        return lambda: results

    def clock(self) -> float:
        """Return the seconds of a clock that stands still while results are made."""
        return time.perf_counter() - self.own_s

    def result(self, share: Any, columns: Sequence[str] | None = None, num_done: int = 0) -> object:
        """Return a column of a forward, or what a rank returns of its updates."""
        if columns is None:
            return self.column[: len(share) * NUM_ACTIONS]
        indices = list(share.share.indices)
        column = self.column[: len(indices) * NUM_ACTIONS]
        return UpdateResult(Metrics(), indices, dict.fromkeys(columns, column))


class KeepingGroup(StubGroup):
    """Keeps the shares it took."""

    def __init__(self, num_ranks: int, num_samples: int) -> None:
        super().__init__(num_ranks, num_samples)
        self.taken: list[Any] = []

    def result(self, share: Any, *args: Any) -> object:
        """Keep the share, and return what a stub returns."""
        self.taken.append(share)
        return super().result(share, *args)


def rollouts_of(num_samples: int) -> list[Rollout]:
    """Return scored samples, each with memory of its own."""
    tokens = torch.randint(0, 150_000, (num_samples, NUM_TOKENS), dtype=torch.int32)
    masks = (torch.arange(NUM_TOKENS) >= NUM_PROMPT).repeat(num_samples, 1)
    logprobs = -torch.rand(num_samples, NUM_ACTIONS)
    versions = torch.zeros(num_samples, NUM_ACTIONS, dtype=torch.int32)
    rewards = torch.rand(num_samples).tolist()
    return [
        Rollout(
            sample_id=f"step1/{k // SAMPLES_A_PROMPT}/{k % SAMPLES_A_PROMPT}",
            group_id=k // SAMPLES_A_PROMPT,
            row_id=k // SAMPLES_A_PROMPT,
            token_ids=tokens[k],
            action_mask=masks[k],
            logprobs=logprobs[k],
            weight_versions=versions[k],
            finish_reason="stop",
            prompt_text="",
            response_text="",
            reward=rewards[k],
        )
        for k in range(num_samples)
    ]


@contextmanager
def adding(times: dict[str, float], name: str, clock: Callable[[], float]) -> Iterator[None]:
    """Add the seconds of the block."""
    start = clock()
    yield
    times[name] += clock() - start


@collecting_only_new_objects()
def step_s(num_samples: int, num_ranks: int) -> dict[str, float]:
    """Return the seconds of the two halves of a step, and the memory that it took."""
    config = PPOConfig.model_validate(
        {
            "actor": {"model_name_or_path": "none"},
            "algo": {"advantage": {"estimator": "group_norm"}, "kl": {"use_loss": True}},
            "rollout": {"n_samples_per_prompt": SAMPLES_A_PROMPT},
            "train": {"batch_size": BATCH_SIZE},
        }
    )
    rollouts, group = rollouts_of(num_samples), KeepingGroup(num_ranks, num_samples)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = group.clock()
    times = dict.fromkeys(("shares", "results"), 0.0)

    def timed(begin: Forward, experience: Experience) -> Callable[[], Tensor]:
        with adding(times, "shares", group.clock):
            pending = begin(experience)

        def wait() -> Tensor:
            with adding(times, "results", group.clock):
                return pending()

        return wait

    num_updates = num_updates_per_rollout(num_samples, BATCH_SIZE, max_epochs=1)
    made_by = forwards_of(config, dict.fromkeys(("actor", "ref"), group), num_updates)
    forwards = {name: partial(timed, begin) for name, begin in made_by.items()}
    experience, _ = make_experience(config, forwards, rollouts, 0.01)
    made = group.clock()
    step_inputs = StepInputs(1, 0.01, 0, [1])
    wait = start_update(
        config, group, experience, step_inputs, role="actor", texts=None, columns=["new_logprobs"]
    )
    results = wait()
    seen = seen_column(results, "new_logprobs", experience.num_actions)
    end = group.clock()
    assert len(seen) == num_samples * NUM_ACTIONS and len(group.taken) > num_ranks
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    columns = sum(array.nbytes for array in experience._arrays.values()) + seen.nbytes
    return {
        "shares_of_a_forward": times["shares"] / len(forwards),
        "results_of_a_forward": times["results"] / len(forwards),
        "columns_and_advantages": made - start - sum(times.values()),
        "updates": end - made,
        "ms_per_100": (end - start) * 1e5 / num_samples,
        "memory_over_columns": used / columns,
        "sending_ms_per_100": sending_s(group.taken) * 1e5 / num_samples,
    }


def sending_s(shares: Sequence[object]) -> float:
    """Return the seconds that it takes to cut and pickle the shares, as Ray has them pickled."""
    start = time.perf_counter()
    for share in shares:
        arrays: list[pickle.PickleBuffer] = []
        pickle.dumps(share, protocol=5, buffer_callback=arrays.append)
    return time.perf_counter() - start


def measured(num_samples: int, num_ranks: int) -> dict[str, float]:
    """Return what `step_s` finds in a process of its own, for the sake of its memory."""
    words = ["--samples", str(num_samples), "--ranks", str(num_ranks)]
    run = [sys.executable, "-m", "benchmarks.controller", *words]
    line = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    return {name: float(value) for name, value in (word.split("=") for word in line.split())}


def draw(found: dict[tuple[int, int], dict[str, float]], picture: Path) -> None:
    """Draw the time for 100 samples over their number, a line for each number of ranks."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    for num_ranks in sorted({ranks for _, ranks in found}):
        points = [(n, row["ms_per_100"]) for (n, ranks), row in found.items() if ranks == num_ranks]
        axes.plot(*zip(*points, strict=True), "o-", label=f"{num_ranks} ranks")
    axes.axhline(2, color="gray", linestyle=":", label="goal")
    axes.set(xscale="log", ylim=(0, None), xlabel="samples of a step", ylabel="ms for 100 samples")
    axes.legend()
    figure.savefig(picture, dpi=90, pil_kwargs={"optimize": True})


def main() -> None:
    """Print a row of docs/speed.md for each size, in ms for 100 samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128, 512])
    parser.add_argument("--picture", type=Path, help="PNG of the curve")
    args = parser.parse_args()
    if len(args.samples) * len(args.ranks) == 1:
        keep_freed_memory()
        step_s(64, 1)  # what is imported or compiled at the first use
        samples, ranks = args.samples[0], args.ranks[0]
        # The first step of a process waits for each page of its memory.
        steps = [step_s(samples, ranks) for _ in range(1 + max(3, NUM_TIMED // samples))]
        found = {name: median(step[name] for step in steps[1:]) for name in steps[0]}
        found["memory_over_columns"] = sum(step["memory_over_columns"] for step in steps)
        print(" ".join(f"{name}={value:.3g}" for name, value in found.items()))
        return
    rows = {}
    for samples in args.samples:
        for ranks in args.ranks:
            row = rows[samples, ranks] = measured(samples, ranks)
            *parts, total, memory, sending = row.values()
            cells = [f"{part * 1e5 / samples:.1f}" for part in parts]
            cells += [f"{cell:.1f}" for cell in (total, sending, memory)]
            print(f"| {samples:,} | {ranks} | {' | '.join(cells)} |", flush=True)
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
