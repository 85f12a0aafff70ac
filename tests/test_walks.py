"""How many files one reads to follow a thing through the house: each walk has a budget.

A walk names its functions in order, as file:function. Each but the first must be called by name in
a file that the walk has passed. Files follow from imports: each is linked to the others of its walk
by an import, or by a Protocol that declares the function.
"""

import ast

import pytest

from tests.source import modules

FILES = {module.where.removeprefix("openrlhf/"): module for module in modules()}

WALKS = {
    "a prompt until it is a group of scored samples": (
        8,
        [
            "rollout/rollout.py:submit",
            "rollout/rollout.py:rollout",
            "rollout/engine_pool.py:act",
            "rollout/engine_pool.py:generate",
            "trainer/ray/vllm_engine.py:sample",
            "engines/vllm_engine.py:sample",
            "rollout/scoring.py:score",
            "rewards/base.py:submit",
        ],
    ),
    "a parameter from the optimizer to the engine that serves it": (
        7,
        [
            "trainer/workers/policy.py:broadcast_to_vllm",
            "distributed/weights.py:stored_parameters",
            "trainer/workers/weight_sync.py:send",
            "trainer/workers/weight_sync.py:buckets",
            "trainer/ray/vllm_engine.py:receive_bucket",
            "engines/vllm_engine.py:receive_bucket",
            "engines/weight_receiver.py:update_weights",
            "engines/weight_transfer.py:read",
        ],
    ),
}


def functions_in(file: str) -> set[str]:
    return {function.name for function in FILES[file].functions}


def names_in(file: str) -> set[str]:
    """Names that a file calls, hands over or, in calls of workers, writes as text."""
    found = set()
    for node in ast.walk(FILES[file].tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def imported_by(file: str) -> set[str]:
    """Files that an import of this one names: the module, or the one a name comes from."""
    found = set()
    for imported in FILES[file].imports:
        for name in (imported.name, imported.name.rpartition(".")[0]):
            found.add(name.removeprefix("openrlhf.").replace(".", "/") + ".py")
    return found


def declared_in(file: str) -> set[str]:
    """Methods of the Protocols of a file."""
    return {
        method.name
        for node in ast.walk(FILES[file].tree)
        if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def linked_files(steps: list[str]) -> set[str]:
    """Files of a walk that imports and Protocols lead to, from the first."""
    named = [tuple(step.split(":")) for step in steps]
    files = {file for file, _ in named}
    links = {(file, other) for file in files for other in imported_by(file) & files}
    links |= {(a, b) for a in files for b, name in named if name in declared_in(a)}
    found, left = {named[0][0]}, -1
    while left != len(found):
        left = len(found)
        found |= {b for pair in links for a, b in (pair, pair[::-1]) if a in found}
    return found


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_passes_no_more_files_than_it_may(walk):
    budget, steps = WALKS[walk]
    files = [step.partition(":")[0] for step in steps]
    for step in steps:
        file, _, name = step.partition(":")
        assert name in functions_in(file), step
    for k, step in enumerate(steps[1:], start=1):
        name = step.partition(":")[2]
        callers = {file for file in files[:k] if name in names_in(file)}
        assert callers, f"nobody before {step} calls it"
    assert linked_files(steps) == set(files)
    assert len(set(files)) <= budget, sorted(set(files))
