"""The sizes of functions; ruff holds the other budgets of the style."""

import statistics

from tests.source import modules


def sizes_in(folder: str) -> list[tuple[int, str]]:
    """Number of lines and place of every function."""
    return [
        ((function.end_lineno or 0) - function.lineno + 1, f"{module.where}: {function.name}")
        for module in modules(folder)
        for function in module.functions
    ]


def test_functions_are_at_most_60_lines():
    assert [pair for pair in sizes_in("openrlhf") + sizes_in("examples") if pair[0] > 60] == []


def test_most_functions_are_a_paragraph():
    sizes = sorted(size for size, _ in sizes_in("openrlhf"))
    assert statistics.median(sizes) <= 12
    assert sizes[int(0.9 * len(sizes))] <= 40
