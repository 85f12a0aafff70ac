"""Print what a run's model said to the first held-out questions, before and after its training.

python examples/results/answers.py RUN [QUESTIONS]
"""

import sys
from pathlib import Path

import pyarrow.parquet


def main() -> None:
    """Print a Markdown table of the first and the last evaluation."""
    run, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 6
    first, *_, last = sorted(run.glob("rollouts/eval_step_*.parquet"))
    columns = ["prompt", "response", "label"]
    before, after = (
        {
            row["prompt"]: row
            for row in pyarrow.parquet.read_table(path, columns=columns).to_pylist()
        }
        for path in (first, last)
    )
    print("| question | right | before | after |\n|---|---|---|---|")
    for prompt in list(before)[:count]:
        question = prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]
        said = [rows[prompt]["response"].removesuffix("<|im_end|>") for rows in (before, after)]
        cells = " | ".join(f"`{text}`" for text in said).replace("\n", " ")
        print(f"| {question} | {before[prompt]['label']} | {cells} |")


if __name__ == "__main__":
    main()
