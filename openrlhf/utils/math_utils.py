"""Reading mathematical answers: pure functions on text that reward files import."""

BOXED = "\\boxed"


def extract_boxed_answer(text: str) -> str | None:
    """Return what the last \\boxed{...} of a text holds, with balanced braces; None without one."""
    start = text.rfind(BOXED + "{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len(BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len(BOXED) + 1 : position]
    return None
