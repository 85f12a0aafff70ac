"""Draw the rewards and pass@1 of runs over their steps, a panel each.

python examples/results/draw_runs.py PICTURE.png TITLE=RUN...
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from draw import PASS1, WINDOW, smooth

from openrlhf.utils.tracker import read_metrics


def main() -> None:
    """Draw all runs."""
    picture, *words = sys.argv[1:]
    shape = {"figsize": (3 * len(words), 2.6), "layout": "constrained", "squeeze": False}
    figure, [row] = plt.subplots(1, len(words), sharey=True, **shape)
    for axes, word in zip(row, words, strict=True):
        title, _, run = word.partition("=")
        records = read_metrics(Path(run) / "metrics.jsonl")
        steps = [record for record in records if "reward" in record]
        rewards = smooth([record["reward"] for record in steps])
        axes.plot([record["step"] for record in steps], rewards, label=f"reward, {WINDOW} steps")
        found = [record for record in records if PASS1 in record]
        if found:
            rates, errors = [r[PASS1] for r in found], [1.96 * r[f"{PASS1}_stderr"] for r in found]
            points = [record["step"] for record in found]
            axes.errorbar(points, rates, errors, fmt="o", capsize=2, label="pass@1")
        axes.set(title=title, xlabel="step", ylim=(0, 1.05))
        axes.legend(fontsize="small")
    figure.savefig(picture, dpi=90, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
