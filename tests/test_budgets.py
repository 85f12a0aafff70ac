"""The budgets of the style: sizes, docstrings, annotations, no print, no broad except."""

from __future__ import annotations

import ast
import statistics

from tests.source import Module, modules

PACKAGE = [module for module in modules() if module.path.name != "__init__.py"]
EXAMPLES = modules("examples")
MAX_FUNCTION_LINES = 60
MAX_DOCSTRING_LINES = 8
MAX_BROAD_EXCEPTS = 0


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def all_functions(found: list[Module]) -> list[tuple[str, int]]:
    """Place and length of every function."""
    return [
        (f"{module.where}:{function.lineno} {function.name}", num_lines(function))
        for module in found
        for function in module.functions
    ]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    spec = function.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    starred = [arg for arg in (spec.vararg, spec.kwarg) if arg is not None]
    return [arg for arg in named + starred if arg.arg not in ("self", "cls")]


def test_functions_are_at_most_60_lines():
    sizes = all_functions(PACKAGE + EXAMPLES)
    assert [f"{where}: {size}" for where, size in sizes if size > MAX_FUNCTION_LINES] == []


def test_most_functions_are_a_paragraph():
    sizes = sorted(size for _, size in all_functions(PACKAGE))
    assert statistics.median(sizes) <= 12
    assert sizes[int(0.9 * len(sizes))] <= 40


def test_every_module_says_what_it_is():
    docs = {m.where: ast.get_docstring(m.tree) or "" for m in PACKAGE + EXAMPLES}
    assert [where for where, doc in docs.items() if not doc] == []
    long = [where for where, doc in docs.items() if len(doc.splitlines()) > MAX_DOCSTRING_LINES]
    assert not long, "\n".join(long)


def test_every_parameter_is_annotated():
    bare = [
        f"{module.where}:{arg.lineno} {function.name}({arg.arg})"
        for module in PACKAGE
        for function in module.functions
        for arg in parameters(function)
        if arg.annotation is None
    ]
    assert not bare, "\n".join(bare)


def test_nothing_prints_outside_the_command_line():
    prints = [
        f"{module.where}:{node.lineno}"
        for module in PACKAGE
        if not module.name.startswith("openrlhf.cli")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id == "print"
    ]
    assert not prints, "\n".join(prints)


def is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return bool(names & {"Exception", "BaseException"})


def goes_on(handler: ast.ExceptHandler) -> bool:
    return not any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def test_no_broad_except_goes_on():
    broad = [
        f"{module.where}:{node.lineno}"
        for module in PACKAGE
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and is_broad(node) and goes_on(node)
    ]
    assert len(broad) <= MAX_BROAD_EXCEPTS, "\n".join(broad)
