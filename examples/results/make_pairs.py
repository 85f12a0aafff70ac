"""Write pairs for a reward model on sums: the right answer, and a wrong one or what the model said.

    python examples/results/make_pairs.py FOLDER NUMBER

Reads FOLDER/samples.jsonl of `openrlhf infer` and FOLDER/held_out.jsonl; writes `pairs.jsonl` with
NUMBER rows, none about a held-out sum or its mirror, and `held_out_pairs.jsonl` about those.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from make_sums import number
from sums_reward import reward_func

DRAW = random.Random(1)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def pair(a: int, b: int, own: str | None = None) -> dict[str, str]:
    """Return a row about `a + b` whose rejected answer is `own`, or a sum that is a little off."""
    right = a + b
    wrong = right + DRAW.choice([-20, -10, -2, -1, 1, 2, 10, 20])
    question = f"What is {a} + {b}?"
    rejected = f"{a} + {b} = {max(wrong, 0)}." if own is None else own
    return {"question": question, "chosen": f"{a} + {b} = {right}.", "rejected": rejected}


def main() -> None:
    """Write both files."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    samples = read(folder / "samples.jsonl")
    responses, labels = ([row[name] for row in samples] for name in ("output", "answer"))
    scores = reward_func(responses, responses, labels, responses)["scores"]

    def terms(question: str) -> tuple[int, int]:
        a, _, b = question.removeprefix("What is ").removesuffix("?").partition(" + ")
        return int(a), int(b)

    held_out = [terms(row["question"]) for row in read(folder / "held_out.jsonl")]
    closed = {*held_out, *((b, a) for a, b in held_out)}
    own = [row for row, score in zip(samples, scores, strict=True) if score == 0]
    pairs = [pair(*terms(row["question"]), row["output"]) for row in own[: count // 2]]
    while len(pairs) < count:
        if (drawn := (number(), number())) not in closed:
            pairs.append(pair(*drawn))
    DRAW.shuffle(pairs)
    for name, rows in {
        "pairs": pairs,
        "held_out_pairs": [pair(*each) for each in held_out],
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(pairs)} pairs, {min(len(own), count // 2)} of them with a sample of the model")


if __name__ == "__main__":
    main()
