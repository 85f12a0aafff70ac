"""Print what methods reached on the held-out questions, of the runs FOLDER/METHOD-SEED/rl.

python examples/results/methods_table.py FOLDER METHOD...
"""

import sys
from pathlib import Path
from statistics import mean, median

import pandas
import torch

from openrlhf.algorithms.evaluation import standard_error, wilson_interval
from openrlhf.utils.tracker import read_metrics

PASS1 = "eval/eval_default_pass1"


def row(method: str, runs: list[Path]) -> str:
    """Return a row: pass@1 of all runs after each evaluation, of each run at the end, with the 95 %
    interval by questions, optimizer steps, samples and seconds a step.
    """
    records = [read_metrics(run / "metrics.jsonl") for run in runs]
    rates = [[record[PASS1] for record in run if PASS1 in record] for run in records]
    steps = [record for run in records for record in run if "timing/step_total" in record]
    last = [max(run.glob("rollouts/eval_step_*.parquet")) for run in runs]
    scores = pandas.concat(
        [pandas.read_parquet(path, columns=["prompt", "reward"]) for path in last]
    )
    questions = torch.tensor(scores.groupby("prompt")["reward"].mean().to_numpy())
    rate = questions.mean().item()
    low, high = wilson_interval(rate, standard_error(questions) or 0.0, len(questions))
    cells = [
        method,
        # Dynamic sampling runs out of prompts, in some seeds a step later than in others.
        " → ".join(f"{mean(each):.2f}" for each in zip(*rates, strict=False)),
        f"{rate:.3f} [{low:.2f}, {high:.2f}]",
        ", ".join(f"{run[-1]:.3f}" for run in rates),
        f"{len(steps) / len(runs):.0f}",
        f"{median(step['timing/step_total'] for step in steps):.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print a Markdown table with a row for each method."""
    folder, methods = Path(sys.argv[1]), sys.argv[2:]
    print("| method | pass@1 by evaluation | at the end | of each seed | steps | s a step |")
    print("|---|---|---|---|---|---|")
    for method in methods:
        print(row(method, sorted(folder.glob(f"{method}-*/rl"))))


if __name__ == "__main__":
    main()
