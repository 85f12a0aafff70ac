"""Names that users import from here; those of other layers are imported when asked for."""

from importlib import import_module
from typing import Any

from openrlhf.utils.math_utils import extract_boxed_answer

__all__ = ["extract_boxed_answer"]

ELSEWHERE = {
    "grade_answer": "openrlhf.rewards.math_grader",
    "get_tokenizer": "openrlhf.utils.tokenizer",
    "get_strategy": "openrlhf.distributed.strategy",
}


def __getattr__(name: str) -> Any:
    if name not in ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(ELSEWHERE[name]), name)
