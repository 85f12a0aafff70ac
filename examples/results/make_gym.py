"""Write questions of a task of reasoning-gym: `held_out.jsonl` with 200 rows, and `prompts.jsonl`
with as many others as asked for, without any of the held-out ones. They are the same for every seed
of a run.

    python examples/results/make_gym.py TASK FOLDER NUMBER
"""

import json
import sys
from pathlib import Path

from reasoning_gym import create_dataset

NUM_HELD_OUT = 200
SIZES = {
    "chain_sum": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_value": 1, "max_value": 100},
    "leg_counting": {"min_animals": 2, "max_animals": 2, "max_instances": 4},
    "count_bits": {"min_n": 1, "max_n": 1023},
    "simple_equations": {"max_terms": 2, "max_value": 20},
    "fraction_simplification": {"max_value": 20, "max_factor": 10, "styles": ("plain",)},
    "letter_counting": {"min_words": 1, "max_words": 3},
    "calendar_arithmetic": {},
    "number_sorting": {"min_numbers": 3, "max_numbers": 4, "max_decimals": 0},
}


def main() -> None:
    """Write both files."""
    task, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    drawn = list(create_dataset(task, seed=0, size=4 * (NUM_HELD_OUT + count), **SIZES[task]))
    rows = {entry["question"]: entry["answer"] for entry in drawn}
    held_out = list(rows)[:NUM_HELD_OUT]
    # As often as they are drawn: the easy ones are few, and would else be rare.
    others = [each["question"] for each in drawn if each["question"] not in {*held_out}]
    prompts = [others[k % len(others)] for k in range(count)]
    for name, part in {"held_out.jsonl": held_out, "prompts.jsonl": prompts}.items():
        lines = [json.dumps({"question": each, "answer": rows[each]}) + "\n" for each in part]
        (folder / name).write_text("".join(lines))
    print(f"{len(held_out)} held-out questions, {len({*others})} others")


if __name__ == "__main__":
    main()
