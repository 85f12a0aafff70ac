"""Write products of numbers of three and two digits as questions that offer a calculator:
`held_out.jsonl` with 100 rows and `prompts.jsonl` with as many others as asked for.

    python examples/results/make_products.py FOLDER NUMBER
"""

import json
import random
import sys
from pathlib import Path

NUM_HELD_OUT = 100
QUESTION = (
    "You have a calculator: write calc(2 * 3) and it says 6. Use it, then answer. What is {} * {}?"
)


def main() -> None:
    """Write both files."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < NUM_HELD_OUT + count:
        pairs[draw.randrange(100, 1000), draw.randrange(11, 100)] = None
    rows = [{"question": QUESTION.format(a, b), "answer": str(a * b)} for a, b in pairs]
    parts = {"held_out.jsonl": rows[:NUM_HELD_OUT], "prompts.jsonl": rows[NUM_HELD_OUT:]}
    for name, part in parts.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main()
