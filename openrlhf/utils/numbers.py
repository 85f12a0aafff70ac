"""Numbers that user code answers, as training can hold them. Imports nothing heavy."""

from __future__ import annotations

import math

FLOAT32_MAX = 3.4028234663852886e38


def as_float32(value: float) -> float:
    """Return a number as a float; infinite if float32 cannot hold it, as torch does."""
    if value != value:
        return math.nan
    if abs(value) <= FLOAT32_MAX:
        return float(value)
    return math.inf if value > 0 else -math.inf
