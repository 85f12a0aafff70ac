"""Write sums of two numbers of one or two digits as questions: `held_out.jsonl` with 200 rows and
`prompts.jsonl` with as many others as asked for: neither a held-out sum nor its mirror, `b + a` for
`a + b`, is among them. They are the same for every seed of a run.

    python examples/results/make_sums.py FOLDER NUMBER
"""

import json
import random
import sys
from pathlib import Path

NUM_HELD_OUT = 200
DRAW = random.Random(0)


def number() -> int:
    """Return a number of one digit or of two, either as often as the other."""
    return DRAW.choice([DRAW.randrange(10), DRAW.randrange(10, 100)])


def main() -> None:
    """Write both files."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    held_out: dict[tuple[int, int], None] = {}
    while len(held_out) < NUM_HELD_OUT:
        held_out[number(), number()] = None
    prompts: list[tuple[int, int]] = []
    while len(prompts) < count:
        a, b = number(), number()
        if (a, b) not in held_out and (b, a) not in held_out:
            prompts.append((a, b))
    parts = {"held_out.jsonl": held_out, "prompts.jsonl": prompts}
    for name, part in parts.items():
        rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in part]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
