"""Turn samples of `openrlhf infer` on sums into rows to learn from.

    python examples/results/sums_rows.py FOLDER

Reads FOLDER/samples.jsonl and writes `right.jsonl` (right responses that end by themselves),
`pairs.jsonl` (a right and a wrong response to the same question), `labelled.jsonl` (all of them,
with 1 or 0) and `boxed.jsonl` (the questions with the answer as `\\boxed{…}`).
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from sums_reward import reward_func

Row = dict[str, Any]


def main() -> None:
    """Write the four files and say how many rows each has."""
    folder = Path(sys.argv[1])
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    responses, labels = ([row[name] for row in samples] for name in ("output", "answer"))
    scores = reward_func(responses, responses, labels, responses)["scores"]
    of_question: dict[str, dict[bool, list[str]]] = defaultdict(lambda: {True: [], False: []})
    labelled: list[Row] = []
    for row, score in zip(samples, scores, strict=True):
        if row["finish_reason"] == "stop":
            of_question[row["question"]][score == 1].append(row["output"])
            kept = {"question": row["question"], "output": row["output"]}
            labelled.append({**kept, "label": int(score)})
    parts = {
        "right": [row for row in labelled if row["label"]],
        "pairs": [
            {"question": question, "chosen": good, "rejected": bad}
            for question, found in of_question.items()
            for good, bad in zip(found[True], found[False], strict=False)
        ],
        "labelled": labelled,
        "boxed": [
            {"question": question, "output": f"The answer is \\boxed{{{label}}}."}
            for question, label in {row["question"]: row["answer"] for row in samples}.items()
        ],
    }
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(", ".join(f"{len(rows)} {name}" for name, rows in parts.items()), "of", len(samples))


if __name__ == "__main__":
    main()
