"""Draw pass@1 of a run of sums.sh, and its rewards beside those of sums_trl.py.

python examples/results/draw.py RUN TRL_LOG PICTURE.png
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

WINDOW = 5  # steps of which the mean is drawn


def records(path: Path) -> list[dict[str, float]]:
    """Return the JSON lines of a file, without other lines."""
    return [json.loads(line) for line in path.read_text().splitlines() if line[:2] == '{"']


def smooth(values: list[float]) -> list[float]:
    """Return the mean of the last steps at each of them."""
    return [
        sum(part) / len(part)
        for part in (values[max(0, k - WINDOW) : k] for k in range(1, 1 + len(values)))
    ]


def main() -> None:
    """Draw both panels."""
    run, trl, picture = map(Path, sys.argv[1:])
    ours, theirs = records(run / "metrics.jsonl"), records(trl)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    found = [r for r in ours if "eval/eval_default_pass1" in r]
    rates = [r["eval/eval_default_pass1"] for r in found]
    errors = [r["eval/eval_default_pass1_stderr"] for r in found]
    left.errorbar(
        [r["step"] for r in found], rates, [1.96 * e for e in errors], fmt="o-", capsize=2
    )
    left.set(title="pass@1 on held-out sums", xlabel="step", ylim=(0, 1))
    steps = [r for r in ours if "reward" in r]
    seconds, minutes = 0.0, []
    for record in steps:
        seconds += record["timing/step_total"]
        minutes.append(seconds / 60)
    right.plot(minutes, smooth([r["reward"] for r in steps]), label="openrlhf")
    minutes = [r["elapsed_s"] / 60 for r in theirs]
    right.plot(minutes, smooth([r["reward"] for r in theirs]), label="TRL 1.16")
    right.set(title=f"reward in training, mean of {WINDOW} steps", xlabel="minutes", ylim=(0, 1))
    right.legend()
    figure.savefig(picture, dpi=90, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
