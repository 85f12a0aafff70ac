"""Print what runs of beside_trl.sh reached: FOLDER/seed-N/rl is ours, FOLDER/seed-N/trl TRL's.

python examples/results/trl_table.py FOLDER
"""

import sys
from pathlib import Path
from statistics import mean, median

from draw import Curve, ours, theirs

RATE = 0.6  # of pass@1, to which the minutes are counted


def cells(curve: Curve) -> list[str]:
    """Return what a run took and what it reached."""
    passed = [step for step, rate in curve.pass1.items() if rate >= RATE]
    lengths = [b - a for a, b in zip([0, *curve.minutes], curve.minutes, strict=False)]
    rates = ", ".join(f"{rate:.2f}" for rate in curve.pass1.values())
    reached = f"{curve.minutes[passed[0] - 1]:.1f} (step {passed[0]})" if passed else "not reached"
    return [reached, f"{60 * median(lengths):.1f}", f"{curve.peak_gib:.1f}", rates]


def main() -> None:
    """Print a Markdown table, with two rows for each seed."""
    print(f"| trained by | seed | minutes to pass@1 {RATE} | s a step | GiB | pass@1 |")
    print("|---|---|---|---|---|---|")
    runs = sorted(Path(sys.argv[1]).glob("seed-*"))
    for name, read in (("openrlhf", ours), ("TRL", theirs)):
        for run in runs:
            row = [name, run.name.removeprefix("seed-"), *cells(read(run))]
            print(f"| {' | '.join(row)} |")
    ratios = [theirs(run).minutes[-1] / ours(run).minutes[-1] for run in runs]
    print(f"TRL takes {mean(ratios):.2f} times as long for as many steps.")


if __name__ == "__main__":
    main()
