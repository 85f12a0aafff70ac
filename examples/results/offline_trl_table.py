"""Print what runs of offline_trl.sh took and reached: FOLDER/seed-N/KIND is ours, trl-KIND TRL's.

python examples/results/offline_trl_table.py FOLDER
"""

import json
import sys
from pathlib import Path
from statistics import mean

from draw import PASS1

from openrlhf.utils.tracker import read_metrics

LOSSES = {"sft": "gpt_loss", "dpo": "loss"}


def ours(run: Path, kind: str) -> list[float]:
    """Return the seconds of training, the most GiB, the losses of the first and the last step."""
    records = read_metrics(run / kind / "metrics.jsonl")
    steps = [record for record in records if "timing/step_total" in record]
    losses = [record[LOSSES[kind]] for record in steps]
    seconds = sum(record["timing/step_total"] for record in steps)
    return [seconds, max(r["memory/peak_gib"] for r in steps), losses[0], losses[-1]]


def theirs(run: Path, kind: str) -> list[float]:
    """Return the same of what offline_trl.py printed."""
    lines = (run / f"trl-{kind}.log").read_text().splitlines()
    steps = [json.loads(line) for line in lines if line.startswith('{"step"')]
    last = steps[-1]
    return [last["elapsed_s"], last["peak_gib"], steps[0]["loss"], last["loss"]]


def main() -> None:
    """Print a Markdown table, with a row for each model."""
    print("| trained by | seed | seconds | GiB | loss of the first step, of the last | pass@1 |")
    print("|---|---|---|---|---|---|")
    runs = sorted(Path(sys.argv[1]).glob("seed-*"))
    for kind in LOSSES:
        sides = {
            f"`{kind}`": [(run, ours(run, kind), run / "eval" / kind) for run in runs],
            f"{kind}, TRL": [
                (run, theirs(run, kind), run / "eval-trl" / f"trl-{kind}") for run in runs
            ],
        }
        for name, found in sides.items():
            for run, (seconds, gib, first, last), judged in found:
                seed = run.name.removeprefix("seed-")
                rate = read_metrics(judged / "metrics.jsonl")[0][PASS1]
                cells = f"{seconds:.0f} | {gib:.1f} | {first:.3f}, {last:.3f} | {rate:.3f}"
                print(f"| {name} | {seed} | {cells} |")
        mine, other = ([each[1][0] for each in found] for found in sides.values())
        ratio = mean(b / a for a, b in zip(mine, other, strict=True))
        print(f"`{kind}`: TRL takes {ratio:.2f} times as long.", file=sys.stderr)


if __name__ == "__main__":
    main()
