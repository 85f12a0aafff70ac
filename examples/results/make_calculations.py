"""Write sums of two numbers of three or four digits: `held_out.jsonl` with 200 rows,
`prompts.jsonl` with as many others as asked for, and `dialogues.jsonl` with 400 dialogues about
still others. Half of the dialogues ask the calculator of calculator_agent.py, the others answer at
once.

    python examples/results/make_calculations.py FOLDER NUMBER
"""

import json
import random
import sys
from itertools import islice
from pathlib import Path
from typing import Any

NUM_HELD_OUT, NUM_DIALOGUES = 200, 400
DRAW = random.Random(0)


def dialogue(a: int, b: int, *, asks: bool) -> list[dict[str, Any]]:
    """Return the messages of a dialogue about a sum."""
    called = [("assistant", f"calculate: {a} + {b}"), ("user", f"result: {a + b}")]
    turns = [
        ("user", f"What is {a} + {b}?"),
        *(called if asks else []),
        ("assistant", f"The answer is {a + b}."),
    ]
    return [{"role": role, "content": content} for role, content in turns]


def main() -> None:
    """Write the three files."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    sums: dict[tuple[int, int], None] = {}
    while len(sums) < NUM_HELD_OUT + NUM_DIALOGUES + count:
        sums[DRAW.randrange(100, 10_000), DRAW.randrange(100, 10_000)] = None
    every = iter(sums)
    parts: dict[str, list[dict[str, Any]]] = {
        name: [
            {"question": f"What is {a} + {b}?", "answer": str(a + b)}
            for a, b in islice(every, number)
        ]
        for name, number in (("held_out", NUM_HELD_OUT), ("prompts", count))
    }
    parts["dialogues"] = [
        {"messages": dialogue(a, b, asks=k % 2 == 0)} for k, (a, b) in enumerate(every)
    ]
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
