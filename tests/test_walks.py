"""How many files one reads to follow a thing through the house: each walk has a budget.

A walk names its functions in order, as file:function. Each but the first must be called by name in
a file that the walk has passed.
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
            "trainer/ray/ppo_actor.py:broadcast_to_vllm",
            "distributed/weights.py:stored_parameters",
            "trainer/ray/weight_sync.py:send",
            "trainer/ray/weight_sync.py:buckets",
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
    assert len(set(files)) <= budget, sorted(set(files))
