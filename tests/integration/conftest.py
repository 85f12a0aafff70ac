"""Data and models the integration tests share."""

from pathlib import Path

import pytest

from tests.helpers.faults import Faults, hooked
from tests.tiny import as_openrlhf_saves, make_model, make_reward_model, write_jsonl

REWARD_CODE = '''
"""Rewards short answers and those that hold the label."""


def reward_func(queries, prompts, labels):
    responses = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    scores = [float(label in response) for response, label in zip(responses, labels)]
    rewards = [score + 1.0 / (1 + len(response)) for score, response in zip(scores, responses)]
    num_chars = [float(len(response)) for response in responses]
    return {"rewards": rewards, "scores": scores, "extra_logs": {"num_chars": num_chars}}
'''


@pytest.fixture(scope="session")
def reward_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny reward model with the policy's tokenizer, as OpenRLHF 0.8 saves it."""
    folder = tmp_path_factory.mktemp("tiny")
    return as_openrlhf_saves(make_reward_model(folder / "made"), folder / "reward")


@pytest.fixture(scope="session")
def critic_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny critic, as OpenRLHF saves one."""
    folder = tmp_path_factory.mktemp("tiny")
    made = make_reward_model(folder / "made")
    return as_openrlhf_saves(made, folder / "critic", head="value_head", kind="CriticModel")


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven prompts: a number that divides no batch."""
    rows = [
        {
            "context_messages": [{"role": "user", "content": f"{i} plus {i} is"}],
            "input": f"{i}+{i}=",
            "answer": str(2 * i),
            "datasource": "even" if i % 2 == 0 else "odd",
        }
        for i in range(11)
    ]
    return write_jsonl(tmp_path_factory.mktemp("data") / "prompts.jsonl", rows)


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward function file."""
    path = tmp_path_factory.mktemp("code") / "reward_func.py"
    path.write_text(REWARD_CODE)
    return path


@pytest.fixture(scope="session")
def two_key_heads_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose layers two ranks can split."""
    return make_model(tmp_path_factory.mktemp("tiny") / "two_key_heads", num_kv_heads=2)


@pytest.fixture
def given(tiny_model_dir: Path, prompt_file: Path, reward_file: Path, tmp_path: Path) -> dict:
    """Names and values of an RL command that works; eleven prompts, a run folder of its own."""
    return {
        "pretrain": tiny_model_dir,
        "prompt_data": prompt_file,
        "remote_rm_url": reward_file,
        "label_key": "answer",
        "save_path": tmp_path / "run",
    }


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Faults that strike a command in this process, once they have a plan."""
    return hooked(monkeypatch, Faults())
