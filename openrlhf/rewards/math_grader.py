"""Compares mathematical answers: 1/2, 0.5, \\frac{1}{2} and \\boxed{50\\%} are the same.

Parsing and comparing are done by math-verify. In the main thread of a process, where the reward
functions of a run are called, a comparison that takes too long is cut off by a signal; in any other
thread, such as a step of an agent, it is made in a worker of a FunctionPool, which is killed.
"""

import logging
import re
import threading
from decimal import Decimal
from functools import lru_cache

import math_verify
from math_verify import ExprExtractionConfig, LatexExtractionConfig, StringExtractionConfig

from openrlhf.errors import RewardError
from openrlhf.rewards.base import RewardBatch
from openrlhf.rewards.workers import FunctionPool
from openrlhf.utils import extract_boxed_answer

PARSE_TIMEOUT_S = 5
COMPARE_TIMEOUT_S = 5
LOAD_TIMEOUT_S = 60  # of math-verify's grammar, on a busy machine
POOL_TIMEOUT_S = 30.0  # of a comparison for a thread
MAX_EXPRESSION = 300  # characters of a text that is read as one expression
END_TOKEN = re.compile(r"<\|[\w-]+\|>\s*$|</s>\s*$")
ENVIRONMENT = re.compile(r"\$.+\$|\\\(|\\\[", re.DOTALL)
# math-verify reads 1e3 as 1 or as 3 times e, 1 000 in LaTeX as 1 times 0, and 2 sqrt(2) as 2.
SCIENTIFIC = re.compile(r"(?<![\w.\\])(?:\d+\.?\d*|\.\d+)[eE][+-]?\d{1,3}(?!\w|\.\d)")
MAX_EXPONENT = 15
ROOT = re.compile(r"\\?sqrt\s*\(([^()]*)\)")
GROUPED = re.compile(r"(?<![\w.,])\d{1,3}(?:[ \u00a0\u202f]\d{3})+(?!\d)")
SIGNS = {"×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "°": ""}
SIGNS |= {"√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "**": "^"}
CHOICE = re.compile(r"\(?([A-J])\)?")
CHOICES = StringExtractionConfig(strings=tuple("ABCDEFGHIJ"))
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
FUNCTIONS = "and|or|sqrt|sin|cos|tan|cot|sec|csc|arc|log|ln|exp|pi|frac"
WORD = re.compile(rf"(?:^|\s)(?!(?:{FUNCTIONS})\b)[A-Za-z]{{2,}}")
WORDS = re.compile(rf"(?!(?:{FUNCTIONS})\b)[A-Za-z][A-Za-z' -]+[A-Za-z]")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it reports every answer it cannot read


def math_equal(answer: str, truth: str) -> bool:
    """Return True if what an answer says last (or in its last box) equals the truth.

    What cannot be read, or compared in a few seconds (in threads: half a minute), is not equal. May
    be called from any thread; it blocks the one it is called from, so an async method awaits it
    as `asyncio.to_thread(math_equal, answer, truth)`. Raises RewardError when the process that
    compares for a thread dies.
    """
    assert isinstance(answer, str), f"an answer is text, not a {type(answer).__name__}"
    if threading.current_thread() is not threading.main_thread():
        return _equal_in_pool(answer, str(truth))
    given, expected = _final(END_TOKEN.sub("", answer)), _final(str(truth))
    words = TEXT.sub(r"\1", expected)
    if CHOICE.fullmatch(words):
        return _choice(given) == _choice(words)
    if WORDS.fullmatch(words):
        ending = rf"(?:^|[^\w-]){re.escape(words)}[\s.!*]*$"
        return re.search(ending, TEXT.sub(r"\1", given), re.IGNORECASE) is not None
    return any(
        bool(math_verify.verify(wanted, found, timeout_seconds=COMPARE_TIMEOUT_S))
        for wanted in _readings(expected)
        for found in _readings(given)
    )


def grade_answer(given_answer: str | None, ground_truth: object) -> bool:
    """Return True if an answer alone, such as that of `extract_boxed_answer`, equals the truth."""
    boxed = f"\\boxed{{{given_answer}}}"  # read as a whole
    return given_answer is not None and math_equal(boxed, str(ground_truth))


def _equal_in_pool(answer: str, truth: str) -> bool:
    """Compare in a worker that runs this very file; one that takes too long finds no equality."""
    pair = RewardBatch([answer], [""], [answer], [truth])
    try:
        return bool(_pool().submit(pair).result().rewards[0])
    except RewardError as error:
        if isinstance(error.__cause__, TimeoutError):
            return False
        raise


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """Compare answers with truths, in a worker."""
    return [float(math_equal(*pair)) for pair in zip(queries, labels, strict=True)]


@lru_cache(maxsize=1)
def _pool() -> FunctionPool:
    # Four processes of about 100 MB, which stay for the next comparison.
    return FunctionPool(
        __file__, batch_size=1, num_workers=4, timeout_s=POOL_TIMEOUT_S, memory_gib=4.0
    )


def _final(text: str) -> str:
    """Return what the last box of a text holds, or the text, without a dot at its end."""
    box = extract_boxed_answer(text)
    return (text if box is None else box).strip().removesuffix(".")


def _choice(text: str) -> list[object]:
    """Return the letter that a text chooses."""
    text = CHOICE.sub(r"\1", TEXT.sub(r"\1", text))
    chosen: list[object] = math_verify.parse(text, [CHOICES], parsing_timeout=PARSE_TIMEOUT_S)
    return chosen


def _readings(text: str) -> list[list[object]]:
    """Return what a text may mean: its last expression, or itself as an expression in LaTeX."""
    text = text.replace("−", "-")
    text = GROUPED.sub(lambda match: re.sub(r"\s", "", match[0]), text)
    text = SCIENTIFIC.sub(_without_e, text)
    text = ROOT.sub(r"\\sqrt{\1}", text)
    if ENVIRONMENT.search(text) or len(text) > MAX_EXPRESSION:
        return [_read(text)]
    bare = text
    for sign, latex in SIGNS.items():
        bare = bare.replace(sign, latex)
    readings = [_read(f"${bare}$")]
    if not readings[0] or WORD.search(text):
        readings.append(_read(text))
    return [reading for reading in readings if reading]


def _without_e(number: re.Match[str]) -> str:
    value, digits, exponent = Decimal(number[0]), *re.split("[eE]", number[0])
    # Beyond that a float is no longer the integer that it is written as.
    is_large = abs(int(exponent)) > MAX_EXPONENT
    return rf"{digits}\times 10^{{{int(exponent)}}}" if is_large else format(value, "f")


@lru_cache(maxsize=4096)
def _read(text: str) -> list[object]:
    """Return the readings of the last expression in a text."""
    _load_grammar()
    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    parsed: list[object] = math_verify.parse(text, kinds, parsing_timeout=PARSE_TIMEOUT_S)
    return parsed


@lru_cache(maxsize=1)
def _load_grammar() -> None:
    """Read a first expression, which takes a second or more: no answer is to pay for it."""
    math_verify.parse(r"$\frac{x}{2}+1$", parsing_timeout=LOAD_TIMEOUT_S)
