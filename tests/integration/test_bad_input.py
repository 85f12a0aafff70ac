"""What a user can get wrong ends in one clear line and the right exit code, before anything heavy
starts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from openrlhf.cli import train_ppo, train_ppo_ray
from openrlhf.engines import vllm_engine
from tests.integration.commands import argv
from tests.tiny import write_jsonl

GOOD = (
    "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "
    "--vllm_num_engines 0"
)


def run(
    capsys: pytest.CaptureFixture[str], flags: str, **values: Path | str
) -> tuple[int, list[str]]:
    """Exit code and error lines of a command run in this process."""
    with pytest.raises(SystemExit) as stop:
        train_ppo.main(argv(flags, **values))
    lines = capsys.readouterr().err.splitlines()
    return int(stop.value.code or 0), [line for line in lines if line.startswith("error: ")]


@pytest.fixture
def good(tiny_model_dir: Path, prompt_file: Path, reward_file: Path, tmp_path: Path) -> dict:
    """Values of a command that works."""
    return {
        "pretrain": tiny_model_dir,
        "prompt_data": prompt_file,
        "remote_rm_url": reward_file,
        "label_key": "answer",
        "save_path": tmp_path / "run",
    }


def without_vllm(name: str) -> object:
    """What find_spec answers where everything but vLLM is installed."""
    return None if name == "vllm" else find_spec(name)


def test_vllm_that_is_not_installed_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], good: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "find_spec", without_vllm)
    code, errors = run(capsys, GOOD, **{**good, "vllm_num_engines": "1"})
    assert (code, len(errors)) == (2, 1)
    for words in ("vLLM", "not installed", ".[vllm]", "make install", "--vllm_num_engines 0"):
        assert words in errors[0]
    by_default = GOOD.replace("--vllm_num_engines 0", "")
    with pytest.raises(SystemExit) as stop:
        train_ppo_ray.main(argv(by_default, **good))
    assert stop.value.code == 2
    assert errors[0] in capsys.readouterr().err
    # Without Ray nobody asked for vLLM: the next problem is said.
    code, errors = run(capsys, by_default, **{**good, "input_key": "question"})
    assert (code, len(errors)) == (2, 1)
    assert "question" in errors[0]


def bad_files(tmp_path: Path) -> dict[str, Path]:
    """Files with one fault each."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    return {"empty": empty, "no_func": _code(tmp_path, "no_func", "x = 1\n")}


def _code(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pretrain": "/nowhere/model"}, "--pretrain /nowhere/model does not exist"),
        ({"prompt_data": "/nowhere/rows.jsonl"}, "/nowhere/rows.jsonl"),
        ({"input_key": "question"}, "question"),
        ({"label_key": "solution"}, "solution"),
        ({"generate_max_len": "4096"}, "2048 positions"),
        ({"prompt_max_len": "2"}, "longer than --prompt_max_len 2"),
        ({"n_samples_per_prompt": "1"}, "--n_samples_per_prompt is 1"),
        ({"train_batch_size": "64"}, "--train_batch_size 64 is more than the 16 samples"),
        ({"remote_rm_url": "/nowhere/reward.py"}, "/nowhere/reward.py"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], good: dict, changes: dict, message: str
) -> None:
    code, errors = run(capsys, GOOD, **{**good, **changes})
    assert code == 2
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [("empty", "prompt_data", "0 rows"), ("no_func", "remote_rm_url", "reward_func")],
)
def test_a_useless_file_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    good: dict,
    tmp_path: Path,
    name: str,
    key: str,
    message: str,
) -> None:
    code, errors = run(capsys, GOOD, **{**good, key: bad_files(tmp_path)[name]})
    assert code == 2
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no such label')", "reward_bad.py:2: ValueError: no such label"),
        ("return {'rewards': [float('nan')] * len(queries)}", "nan"),
        ("return {'rewards': [1.0]}", "1 values for"),
        ("return {'scores': [1.0]}", "no 'rewards'"),
    ],
)
def test_a_reward_that_fails_during_the_run_is_exit_code_3(
    capsys: pytest.CaptureFixture[str], good: dict, tmp_path: Path, body: str, message: str
) -> None:
    path = _code(
        tmp_path, "reward_bad", f"def reward_func(queries, prompts, labels):\n    {body}\n"
    )
    code, errors = run(capsys, GOOD, **{**good, "remote_rm_url": path})
    assert code == 3
    assert len(errors) == 1
    assert message in errors[0]


def test_a_conflict_a_model_and_the_columns_are_one_list(
    capsys: pytest.CaptureFixture[str], good: dict
) -> None:
    changes = {"pretrain": "/nowhere/model", "n_samples_per_prompt": "1", "label_key": "gold"}
    code, errors = run(capsys, GOOD, **{**good, **changes})
    assert code == 2
    group, model, label = errors
    assert "--n_samples_per_prompt is 1" in group
    assert "--pretrain /nowhere/model does not exist" in model
    assert "column 'gold' is not in the data set" in label


def test_a_useless_reward_file_hides_no_column(
    capsys: pytest.CaptureFixture[str], good: dict, tmp_path: Path
) -> None:
    changes = {"label_key": "gold", "remote_rm_url": bad_files(tmp_path)["no_func"]}
    code, errors = run(capsys, GOOD, **{**good, **changes})
    assert code == 2
    label, function = errors
    assert "column 'gold'" in label and "reward_func" in function


def test_all_problems_are_said_at_once(capsys: pytest.CaptureFixture[str], good: dict) -> None:
    code, errors = run(capsys, GOOD + " --gamma 0.9 --top_p 3 --rollout_bacth_size 4", **good)
    assert code == 2
    text = "\n".join(errors)
    assert "--gamma" in text
    assert "--top_p" in text
    assert "--rollout_batch_size" in text


@pytest.mark.slow  # each starts Python with all libraries twice
@pytest.mark.parametrize("is_silent", [True, False])
def test_a_hub_that_cannot_be_reached_is_one_line(
    good: dict, tmp_path: Path, *, is_silent: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        if not is_silent:  # nobody listens there any more
            server.close()
        offline = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
        env = {name: value for name, value in os.environ.items() if name not in offline}
        env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_ETAG_TIMEOUT": "3"}
        rows = {"pretrain": good["pretrain"], "dataset": "org/rows@part"}
        for name, words, missing in (
            ("train_ppo", argv(GOOD, **{**good, "pretrain": "org/none"}), "model org/none"),
            ("train_sft", argv("", sizes="", **rows, save_path=tmp_path), "data set org/rows@part"),
        ):
            command = [sys.executable, "-m", f"openrlhf.cli.{name}", *words]
            result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
            (line,) = result.stderr.splitlines()
            assert line.startswith(f"error: {missing} is neither here nor in the hub's cache")
            assert f"the hub at {endpoint} does not answer" in line
            assert result.returncode == 2


def test_a_missing_column_is_no_traceback_and_leaves_no_process(good: dict, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text_of_mine": "hi"}])
    words = argv(GOOD, **{**good, "prompt_data": rows})
    before = _raylets()
    command = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *words]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"RAY_ADDRESS": "local"},
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "text_of_mine" in result.stderr
    assert _raylets() <= before


def _raylets() -> set[int]:
    """Processes of Ray nodes on this machine."""
    return {p.pid for p in psutil.process_iter(["name"]) if p.info["name"] == "raylet"}


@pytest.mark.usefixtures("ray_cluster")
def test_too_few_gpus_is_a_table_within_ten_seconds(
    capsys: pytest.CaptureFixture[str], good: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openrlhf.trainer import ppo_run
    from openrlhf.trainer.ray.placement import ClusterView

    cluster = ClusterView(num_gpus=1, num_cpus=2, max_gpus_per_node=1)
    monkeypatch.setattr(ppo_run, "view_cluster", lambda: cluster)
    start = time.monotonic()
    with pytest.raises(SystemExit) as stop:
        train_ppo_ray.main(argv(GOOD, **{**good, "actor_num_gpus_per_node": "3"}))
    assert time.monotonic() - start < 10
    assert stop.value.code == 2
    errors = capsys.readouterr().err
    assert "need 3, have 1" in errors
    assert "actor" in errors
