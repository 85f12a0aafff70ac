"""Says what a run's evaluations were before and after, and draws reward, length and KL to a PNG.

Reads nothing but the run folder's metrics.jsonl, so it works for every run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = (("reward", "reward"), ("response_length", "tokens in a response"), ("kl", "KL"))
Record = dict[str, float]


def read_records(run_dir: Path) -> list[Record]:
    """The records of metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def series(records: list[Record], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of one metric, where it was logged."""
    found = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def pass1_name(records: list[Record]) -> str | None:
    """The first logged evaluation metric that ends in pass1."""
    names = (name for record in records for name in record if name.endswith("_pass1"))
    return next(names, None)


def report(records: list[Record], min_gain: float | None) -> bool:
    """Print pass@1 before and after; answers whether the gain is large enough."""
    name = pass1_name(records)
    if name is None:
        print("no evaluation was logged")
        return min_gain is None
    _, values = series(records, name)
    gain = values[-1] - values[0]
    print(f"{name} before {values[0]:.3f}, after {values[-1]:.3f}: {gain:+.3f}")
    if min_gain is None or gain >= min_gain:
        return True
    print(f"the gain {gain:+.3f} is less than the {min_gain:+.3f} asked for", file=sys.stderr)
    return False


def draw(records: list[Record], path: Path) -> None:
    """One panel a metric; held-out pass@1 as points over the reward."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3.2), layout="constrained")
    for axis, (name, label) in zip(axes, PANELS, strict=True):
        axis.plot(*series(records, name), label="training")
        axis.set_xlabel("step")
        axis.set_title(label)
    evaluated = pass1_name(records)
    if evaluated is not None:
        axes[0].plot(*series(records, evaluated), "o--", label="held out")
        axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Report and draw one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, default=None, help="default: RUN_DIR/curves.png")
    parser.add_argument("--min_gain", type=float, default=None, help="exit with 1 below this")
    args = parser.parse_args()
    records = read_records(args.run_dir)
    path = args.out or args.run_dir / "curves.png"
    draw(records, path)
    print(f"curves: {path}")
    if not report(records, args.min_gain):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
