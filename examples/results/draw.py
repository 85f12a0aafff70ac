"""Draw pass@1 of a run of sums.sh, and the rewards of runs of beside_trl.sh over the minutes.

python examples/results/draw.py RUN FOLDER PICTURE.png
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt

from openrlhf.utils.tracker import read_metrics

WINDOW = 5  # steps of which the mean is drawn
PASS1 = "eval/eval_default_pass1"


@dataclass(frozen=True)
class Curve:
    """A run: the mean reward and the minutes of training so far of each step, pass@1 after steps,
    and the most memory that it held.
    """

    rewards: list[float]
    minutes: list[float]
    pass1: dict[int, float]
    peak_gib: float


def ours(run: Path) -> Curve:
    """Return the curve of what `sums.sh` wrote to a folder."""
    records = read_metrics(run / "rl" / "metrics.jsonl")
    steps = [record for record in records if "timing/step_total" in record]
    minutes = [0.0]
    for record in steps:
        minutes.append(minutes[-1] + record["timing/step_total"] / 60)
    return Curve(
        rewards=[record["reward"] for record in steps],
        minutes=minutes[1:],
        pass1={int(r["step"]): r[PASS1] for r in records if PASS1 in r and r["step"]},
        peak_gib=max(record["memory/actor_gib"] for record in steps),
    )


def theirs(run: Path) -> Curve:
    """Return the curve of what `sums_trl.py` printed, and `openrlhf eval` found after it."""
    lines = (run / "trl.log").read_text().splitlines()
    steps = [json.loads(line) for line in lines if line.startswith('{"step"')]
    found = {
        int(path.parent.name.removeprefix("step-")): read_metrics(path)[0][PASS1]
        for path in run.glob("eval/step-*/metrics.jsonl")
    }
    return Curve(
        rewards=[record["reward"] for record in steps],
        minutes=[record["elapsed_s"] / 60 for record in steps],
        pass1=dict(sorted(found.items())),
        peak_gib=max(record["peak_gib"] for record in steps),
    )


def smooth(values: list[float]) -> list[float]:
    """Return the mean of the last steps at each of them."""
    return [
        sum(part) / len(part)
        for part in (values[max(0, k - WINDOW) : k] for k in range(1, 1 + len(values)))
    ]


def main() -> None:
    """Draw both panels."""
    run, folder, picture = map(Path, sys.argv[1:])
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    found = [r for r in read_metrics(run / "metrics.jsonl") if PASS1 in r]
    rates, errors = [r[PASS1] for r in found], [r[f"{PASS1}_stderr"] for r in found]
    left.errorbar(
        [r["step"] for r in found], rates, [1.96 * e for e in errors], fmt="o-", capsize=2
    )
    left.set(title="pass@1 on held-out sums", xlabel="step", ylim=(0, 1))
    for name, read, color in (("openrlhf", ours, "C0"), ("TRL 1.16", theirs, "C1")):
        for number, seed in enumerate(sorted(folder.glob("seed-*"))):
            curve = read(seed)
            label = None if number else name
            right.plot(curve.minutes, smooth(curve.rewards), color, alpha=0.8, label=label)
    right.set(title=f"reward in training, mean of {WINDOW} steps", xlabel="minutes", ylim=(0, 1))
    right.legend()
    figure.savefig(picture, dpi=90, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
