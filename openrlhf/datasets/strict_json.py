"""JSON of data sets, read as it stands or not at all."""

import json
import math
import re
from typing import Any, NoReturn


def strict_json(text: str) -> Any:
    """Return the value that a text spells.

    Raises ValueError for what is no JSON, for a key that stands twice, and for a number that is not
    finite or too large or too small for a float; RecursionError for one that is nested too deeply.
    """
    return json.loads(
        text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite
    )


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)}")
    return row


def _finite(text: str) -> float:
    """Return a number; raise ValueError for one that is too large or too small for a float."""
    number, digits = float(text), text.lower().partition("e")[0]
    is_lost = math.isinf(number) or (number == 0 and re.search("[1-9]", digits) is not None)
    return _refuse_constant(text) if is_lost else number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that can be trained on")
