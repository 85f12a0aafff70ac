"""Verifiable rewards that look at the text alone: pure functions of a response, 0.0 or 1.0."""

import re
from collections.abc import Sequence


def matches(text: str, pattern: str) -> float:
    """Return 1.0 if a regular expression is found anywhere; `.` matches line ends too."""
    return float(re.search(pattern, text, re.DOTALL) is not None)


def matches_whole(text: str, pattern: str) -> float:
    """Return 1.0 if a regular expression matches the whole text, without blanks around it."""
    return float(re.fullmatch(pattern, text.strip(), re.DOTALL) is not None)


def has_tags_in_order(text: str, tags: Sequence[str] = ("think", "answer")) -> float:
    """Return 1.0 if the text is exactly `<think>...</think> <answer>...</answer>`: every tag once,
    in this order, nothing but blanks between them.
    """
    for tag in tags:
        if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
            return 0.0
    return matches_whole(text, r"\s*".join(f"<{re.escape(t)}>.*</{re.escape(t)}>" for t in tags))


def tag_content(text: str, tag: str) -> str | None:
    """Return what stands in the last `<tag>...</tag>`; None without one."""
    found = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def code_block(text: str, language: str = "python") -> str | None:
    """Return the last fenced block of a language, or of none; None without a block."""
    found = re.findall(rf"```(?:{re.escape(language)})?[ \t]*\n(.*?)```", text, re.DOTALL)
    return found[-1] if found else None
