"""Every source of rewards in whole runs, and what a reward that cannot be had does to them."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from openrlhf.cli import train_ppo
from tests.integration.commands import argv, exit_code, steps_of
from tests.rewards.servers import RewardServer, free_url
from tests.tiny import make_reward_model

FLAGS = "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "

# What is done for the prompt 3+3= is put in by the test.
UNRULY = """
import os, time

def reward_func(queries, prompts, labels):
    if "6" in labels:
        {what}
    return {{"rewards": [float(len(query)) for query in queries]}}
"""


@pytest.fixture
def values(given: dict) -> dict[str, Path | str]:
    """What all commands share but their source of rewards."""
    return {name: value for name, value in given.items() if name != "remote_rm_url"}


def error_of(
    capsys: pytest.CaptureFixture[str], flags: str, **values: Path | str
) -> tuple[int, str]:
    """Exit code and error line of a run that fails."""
    code = exit_code(train_ppo.main, argv(flags, **values))
    said = capsys.readouterr().err
    [line] = [x for x in said.splitlines() if x.startswith("error: ")]
    assert code != 3 or "Traceback" not in said  # it is not the user's code that failed
    return code, line


@pytest.mark.parametrize(
    ("what", "message", "code"),
    [
        ("time.sleep(1e6)", "did not end in 2 s (--reward_timeout_s)", 3),
        ("return {'rewards': [float('nan')] * len(queries)}", "nan", 3),
        ("labels[9]", "unruly.py:6: IndexError: list index out of range", 2),
    ],
)
def test_a_reward_that_cannot_be_had_ends_the_run_before_it_trains(
    values: dict,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    what: str,
    message: str,
    code: int,
) -> None:
    file = tmp_path / "unruly.py"
    file.write_text(UNRULY.format(what=what))
    flags = FLAGS + "--reward_timeout_s 2 --reward_num_workers 2 --max_samples 4"
    exit_code, error = error_of(capsys, flags, remote_rm_url=file, rollout_batch_size="4", **values)
    assert exit_code == code and message in error
    assert steps_of(tmp_path / "run") == []


def test_rewards_of_servers_train_the_policy(values: dict, tmp_path: Path) -> None:
    with ExitStack() as stack:
        good, other = (stack.enter_context(RewardServer()) for _ in range(2))
        urls = f"{good.url},{free_url()},{other.url}"  # one is not there
        train_ppo.main(argv(FLAGS, remote_rm_url=urls, **values))
    assert len(steps_of(tmp_path / "run")) == 2
    assert len(good.queries) + len(other.queries) == 22  # every sample once
    assert good.queries and other.queries
    assert max(len(body["query"]) for body in good.requests) == 4  # --micro_rollout_batch_size
    assert sorted(label for s in (good, other) for b in s.requests for label in b["labels"]) == (
        sorted(str(2 * i) for i in range(11) for _ in range(2))
    )


def test_a_reward_model_that_cannot_read_a_whole_sample_is_refused(
    values: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = make_reward_model(tmp_path / "short", max_position_embeddings=71)
    exit_code, error = error_of(capsys, FLAGS, reward_pretrain=short, **values)
    assert exit_code == 2
    assert f"71 positions of the model {short}. Type --prompt_max_len 63" in error
