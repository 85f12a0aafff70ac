"""Leaves of the package; `from openrlhf.utils import extract_boxed_answer` is what users write."""

from openrlhf.utils.math_utils import extract_boxed_answer

__all__ = ["extract_boxed_answer"]
