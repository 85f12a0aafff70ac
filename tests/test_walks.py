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
    "a prompt until the user's function has scored its group": (
        8,
        [
            "rollout/rollout.py:submit",
            "rollout/rollout.py:rollout",
            "rollout/engine_pool.py:samples_of",
            "rollout/engine_pool.py:_sample_on",
            "trainer/ray/vllm_engine.py:sample",
            "engines/vllm_engine.py:sample",
            "rollout/scoring.py:score",
            "rewards/base.py:submit",
            "rewards/workers.py:score_part",
            "rewards/workers.py:serve",
            "rewards/function.py:answer",
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
    "the state of a supervised run into its checkpoint": (
        4,
        [
            "commands/train_supervised.py:after_step",
            "distributed/checkpoints.py:save",
            "commands/train_supervised.py:take",
            "distributed/train_engine.py:take_states",
            "distributed/folders.py:take_tensors",
            "distributed/folders.py:seal",
        ],
    ),
    "the state of an RL run to its workers": (
        4,
        [
            "trainer/ppo_trainer.py:save_if_due",
            "distributed/checkpoints.py:save",
            "trainer/ppo_state.py:take",
            "trainer/workers/model_worker.py:take_states",
        ],
    ),
}

MAX_ROOMS = 15  # functions that a flag passes, from parsing to the line that obeys it
TO_PARSING = ["cli/train_ppo.py:main", "cli/runner.py:imported"]
REWARD_CLIP_RANGE = [
    "cli/runner.py:run",
    "config/cli.py:read_config",
    "config/cli.py:take_all",
    "config/cli.py:_flags",
    "config/cli.py:_take",
    "config/cli.py:_raw_value",
    "config/cli.py:build",
    "commands/train_rl.py:run_ppo_local",
    "commands/train_rl.py:_open_and_run",
    "commands/train_rl.py:_run",
    "trainer/ppo_trainer.py:fit",
    "trainer/ppo_trainer.py:train_step",
    "trainer/ppo_utils/experience_maker.py:make_experience",
    "algorithms/advantages.py:compute",
]


def functions_in(file: str) -> set[str]:
    """Functions and methods of a file, and what its top level sets, such as a command."""
    set_names = {
        target.id
        for node in FILES[file].tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {function.name for function in FILES[file].functions} | set_names


def names_in(file: str) -> set[str]:
    """Names that a file calls, hands over or, in calls of workers, writes as text."""
    found = set()
    for node in ast.walk(FILES[file].tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value.rpartition(":")[2])  # of "module:name"
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


def check_is_walk(steps: list[str]) -> None:
    files = [step.partition(":")[0] for step in steps]
    for k, step in enumerate(steps):
        file, _, name = step.partition(":")
        assert name in functions_in(file), step
        callers = {file for file in files[:k] if name in names_in(file)}
        assert callers or k == 0, f"nobody before {step} calls it"
    assert linked_files(steps) == set(files)


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_passes_no_more_files_than_it_may(walk):
    budget, steps = WALKS[walk]
    check_is_walk(steps)
    files = {step.partition(":")[0] for step in steps}
    assert len(files) <= budget, sorted(files)


def test_a_flag_enters_no_more_rooms_than_it_may():
    check_is_walk([*TO_PARSING, *REWARD_CLIP_RANGE])
    assert len(REWARD_CLIP_RANGE) <= MAX_ROOMS
