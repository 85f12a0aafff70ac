"""What a user can get wrong ends in one clear line and the right exit code, before anything heavy
starts.
"""

import errno
from importlib.util import find_spec
from pathlib import Path

import pytest

from openrlhf.cli import runner, train_ppo, train_ppo_ray
from openrlhf.engines import vllm_engine
from tests.integration.commands import argv, exit_code

GOOD = (
    "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "
    "--vllm_num_engines 0"
)


def run(
    capsys: pytest.CaptureFixture[str], flags: str, **values: Path | str
) -> tuple[int, list[str]]:
    """Exit code and error lines of a command run in this process."""
    code = exit_code(train_ppo.main, argv(flags, **values))
    said = capsys.readouterr().err
    assert code in (2, 3), said
    lines = said.splitlines()
    return code, [line for line in lines if line.startswith("error: ")]


def without_vllm(name: str) -> object:
    """What find_spec answers where everything but vLLM is installed."""
    return None if name == "vllm" else find_spec(name)


def test_vllm_that_is_not_installed_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], given: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "find_spec", without_vllm)
    code, errors = run(capsys, GOOD, **{**given, "vllm_num_engines": "1"})
    assert (code, len(errors)) == (2, 1)
    for words in ("vLLM", "not installed", ".[vllm]", "make install", "--vllm_num_engines 0"):
        assert words in errors[0]
    by_default = GOOD.replace("--vllm_num_engines 0", "")
    assert exit_code(train_ppo_ray.main, argv(by_default, **given)) == 2
    assert errors[0] in capsys.readouterr().err
    # Without Ray nobody asked for vLLM: the next problem is said.
    code, errors = run(capsys, by_default, **{**given, "input_key": "question"})
    assert (code, len(errors)) == (2, 1)
    assert "question" in errors[0]


def test_a_limit_that_leaves_no_prompt_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], given: dict
) -> None:
    code, errors = run(capsys, GOOD, **{**given, "prompt_max_len": "2"})
    assert (code, len(errors)) == (2, 1)
    assert "Check --prompt_max_len" in errors[0]


def test_shared_memory_that_is_full_is_said_before_anything_waits(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    given: dict,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(runner, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(runner, "MIN_SHARED_MEMORY", 10**18)
    code, errors = run(capsys, GOOD, **given)
    assert (code, len(errors)) == (2, 1)
    assert errors[0].startswith(f"error: {tmp_path} has ") and "--shm-size" in errors[0]


def test_a_machine_that_is_out_of_something_is_one_line_and_exit_code_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: dict
) -> None:
    def prepare(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("openrlhf.commands.train_rl.prepare_inputs", prepare)
    code, errors = run(capsys, GOOD, **given)
    assert (code, len(errors)) == (3, 1)
    assert errors[0].startswith("error: this machine is out of something: Too many open files.")
