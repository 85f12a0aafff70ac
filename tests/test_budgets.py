"""The sizes of functions and the first words of docstrings; ruff holds the other budgets."""

import re
import statistics

from tests.source import modules


def sizes_in(folder: str) -> list[tuple[int, str]]:
    """Number of lines and name of every function."""
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


def test_docstrings_name_what_they_return_by_a_noun():
    first = re.compile(r'"""(Return|Yield) (what|how|where|why|whether|which)\b.*')
    found = [
        match.group() for module in modules("openrlhf") for match in first.finditer(module.text)
    ]
    assert found == []
