"""Runs in one process are checked, and GPU tests collected, where Ray is not installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source import ROOT
from tests.tiny import write_jsonl

HIDING_RAY = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def run(folder: Path, words: list[str], *, where: Path) -> str:
    """What `python WORDS` prints in a process that has no Ray; it must end well."""
    (folder / "sitecustomize.py").write_text(HIDING_RAY)
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    options = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, *words], cwd=where, env=env, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_in_one_process_is_checked(tiny_model_dir: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"input": "1+1=", "answer": "2"}] * 4)
    code = "def reward_func(queries, prompts, labels):\n    return [1.0] * len(labels)\n"
    (tmp_path / "reward.py").write_text(code)
    words = f"--pretrain {tiny_model_dir} --prompt_data rows.jsonl --remote_rm_url reward.py "
    words += "--label_key answer --save_path run --vllm_num_engines 0 --prompt_max_len 32 "
    words += "--generate_max_len 8 --rollout_batch_size 4 --train_batch_size 4 "
    words += "--micro_train_batch_size 2 --advantage_estimator reinforce"
    check = ["-m", "openrlhf.cli.main", "check", "ppo-local", *words.split()]
    assert "no problem was found" in run(tmp_path, check, where=tmp_path)
    with pytest.raises(AssertionError, match="No module named 'ray'"):
        run(tmp_path, ["-c", "import ray"], where=tmp_path)


@pytest.mark.slow
def test_gpu_tests_are_collected(tmp_path: Path) -> None:
    words = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    assert "test_bf16_packed_stays_near_fp32" in run(tmp_path, words, where=ROOT)
