"""Says what a run's evaluations were before and after, and draws its curves to a PNG.

    python examples/python/plot_run.py ./output/sft

Reads nothing but the run folder's metrics.jsonl, so it works for every run: reward, length and KL
of reinforcement learning, loss, accuracy and learning rate of supervised training.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Title of a panel -> names of its metric, of which the first that was logged is drawn.
PANELS = {
    "reward": ("reward",),
    "loss": ("gpt_loss", "kto_loss", "prm_loss", "distil_loss", "loss"),
    "accuracy": ("acc",),
    "tokens in a response": ("response_length",),
    "KL": ("kl",),
    "gradient norm": ("grad_norm",),
    "learning rate": ("lr",),
}
Record = dict[str, float]


def read_records(run_dir: Path) -> list[Record]:
    """The records of metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def series(records: list[Record], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of one metric, where it was logged."""
    found = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def panels(records: list[Record]) -> dict[str, str]:
    """Return the metric of every panel that the run has numbers for, by its title."""
    logged = {name for record in records for name in record}
    found = {
        title: next((name for name in names if name in logged), None)
        for title, names in PANELS.items()
    }
    return {title: name for title, name in found.items() if name is not None}


def held_out_name(records: list[Record], name: str) -> str | None:
    """Return the evaluation of a training metric: pass@1 of the reward, else its own name."""
    logged = [key for record in records for key in record]
    if name == "reward":
        return next((key for key in logged if key.endswith("_pass1")), None)
    return f"eval/{name}" if f"eval/{name}" in logged else None


def report(records: list[Record], min_gain: float | None) -> bool:
    """Print the evaluation before and after; return whether pass@1 gained enough."""
    names = [held_out_name(records, name) for name in panels(records).values()]
    evaluated = [name for name in names if name is not None]
    if not evaluated:
        print("no evaluation was logged")
        return min_gain is None
    for name in evaluated:
        _, values = series(records, name)
        gain = values[-1] - values[0]
        print(f"{name} before {values[0]:.3f}, after {values[-1]:.3f}: {gain:+.3f}")
    _, values = series(records, evaluated[0])
    gain = values[-1] - values[0]
    if min_gain is None or gain >= min_gain:
        return True
    print(f"the gain {gain:+.3f} is less than the {min_gain:+.3f} asked for", file=sys.stderr)
    return False


def draw(records: list[Record], path: Path) -> None:
    """One panel a metric; evaluations as points over the training's line."""
    shown = panels(records)
    figure, axes = plt.subplots(
        1, len(shown), figsize=(4 * len(shown), 3.2), layout="constrained", squeeze=False
    )
    for axis, (title, name) in zip(axes[0], shown.items(), strict=True):
        axis.plot(*series(records, name), label="training")
        axis.set_xlabel("step")
        axis.set_title(title)
        evaluated = held_out_name(records, name)
        if evaluated is not None:
            axis.plot(*series(records, evaluated), "o--", label="held out")
            axis.legend()
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
