"""Whether two mathematical answers are the same: 1/2, 0.5, \\frac{1}{2} and \\boxed{50\\%} are.

Parsing and comparing are done by math-verify. In the main thread of a process, where the reward
functions of a run are called, a comparison that takes too long is cut off by a signal; in any other
thread, such as a step of an agent, it is made in a helper process.
"""

from __future__ import annotations

import logging
import re
import threading
from functools import lru_cache

import math_verify
from math_verify import ExprExtractionConfig, LatexExtractionConfig

from openrlhf.rewards.math_process import MATH_PROCESSES
from openrlhf.utils import extract_boxed_answer

PARSE_TIMEOUT_S = 3
COMPARE_TIMEOUT_S = 3
END_TOKEN = re.compile(r"<\|[\w-]+\|>\s*$|</s>\s*$")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it reports every answer it cannot read


def math_equal(answer: str, truth: str) -> bool:
    """Whether what an answer says last (or in its last box) equals the truth.

    What cannot be read, or compared in a few seconds (in threads: half a minute), is not equal. May
    be called from any thread; it blocks the one it is called from, so an async method awaits it
    as `asyncio.to_thread(math_equal, answer, truth)`. Raises RewardError when a thread's helper
    process cannot be started, or dies.
    """
    assert isinstance(answer, str), f"an answer is text, not a {type(answer).__name__}"
    if threading.current_thread() is not threading.main_thread():
        return MATH_PROCESSES.compare(answer, str(truth))
    box = extract_boxed_answer(answer)
    text = END_TOKEN.sub("", answer)
    readings = [_read_bare(box)] if box is not None else [_read(text), _read_bare(text)]
    expected = _read_bare(str(truth))
    return any(
        bool(math_verify.verify(expected, found, timeout_seconds=COMPARE_TIMEOUT_S))
        for found in readings
        if found and expected
    )


def _read_bare(text: str) -> list[object]:
    """Readings of an expression that stands alone, as LaTeX or plain."""
    return _read(f"${text}$") or _read(text)


@lru_cache(maxsize=4096)
def _read(text: str) -> list[object]:
    """Readings of the last expression in a text."""
    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    parsed: list[object] = math_verify.parse(text, kinds, parsing_timeout=PARSE_TIMEOUT_S)
    return parsed
