"""What ends a run rather than train on nonsense: a side that samples otherwise, rewards that say
nothing.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openrlhf.cli import train_ppo
from openrlhf.utils.tracking import read_metrics
from tests.integration.commands import argv

FLAGS = "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "


def run(capsys: pytest.CaptureFixture[str], flags: str, **values: Path | str) -> tuple[int, str]:
    """Exit code and error line of a run that ends early."""
    with pytest.raises(SystemExit) as stop:
        train_ppo.main(argv(FLAGS + flags, **values))
    [line] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    return int(stop.value.code or 0), line


@pytest.fixture
def values(
    tiny_model_dir: Path, prompt_file: Path, reward_file: Path, tmp_path: Path
) -> dict[str, Path | str]:
    return {
        "pretrain": tiny_model_dir,
        "prompt_data": prompt_file,
        "label_key": "answer",
        "remote_rm_url": reward_file,
        "save_path": tmp_path / "run",
    }


def without_temperature(generate: Any) -> Any:
    """The same method of an engine that forgot the temperature."""

    def forgetful(self: Any, requests: Any, *args: Any, **options: Any) -> Any:
        plain = [replace(r, sampling=replace(r.sampling, temperature=1.0)) for r in requests]
        return generate(self, plain, *args, **options)

    return forgetful


FORGETFUL = """
import sys
from openrlhf.cli import train_ppo
from openrlhf.engines.{module} import {engine}
from tests.integration.test_gates import without_temperature

{engine}.{method} = without_temperature({engine}.{method})
train_ppo.main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "engine", "method", "flags"),
    [
        ("own_generate", "OwnGenerate", "generate", ""),
        ("vllm_engine", "VLLMEngine", "submit", "--vllm_num_engines 1 --enforce_eager"),
    ],
    ids=["transformers", "vllm"],
)
def test_a_temperature_that_one_side_forgot_ends_the_first_step(
    values: dict, module: str, engine: str, method: str, flags: str
) -> None:
    """In processes of their own: one that held vLLM and let go of it cannot hold it again."""
    flags = f"{flags} --temperature 0.6 --max_samples 4 --rollout_batch_size 4"
    command = [sys.executable, "-m", "openrlhf.cli.train_ppo", *argv(FLAGS + flags, **values)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr[-2000:]
    [step] = [r for r in read_metrics(values["save_path"] / "metrics.jsonl") if "reward" in r]
    assert step["vllm_kl"] < 1e-6 and step["logprobs_diff_max"] < 1e-3
    values["save_path"] = values["save_path"].with_name("forgetful")
    code = FORGETFUL.format(module=module, engine=engine, method=method)
    command = [sys.executable, "-c", code, *argv(FLAGS + flags, **values)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert result.returncode == 3, result.stderr[-2000:]
    said = "engine and trainer disagree about the sampled tokens at step 1"
    assert said in result.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--dynamic_filtering_max_empty 3 --num_episodes 9", "3 batches in a row"),
        ("--max_samples 4", "no prompt could be trained on: 4 drawn, 4 filtered:no signal"),
    ],
    ids=["many prompts", "few prompts"],
)
def test_a_constant_reward_ends_a_filtered_run(
    values: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, reason: str
) -> None:
    code_file = tmp_path / "constant.py"
    code_file.write_text("def reward_func(queries, prompts, labels): return [0.3] * len(queries)\n")
    values["remote_rm_url"] = code_file
    code, error = run(capsys, f"--dynamic_filtering {flags}", **values)
    assert code == 3
    assert reason in error and "pass rate 0 %" in error
    assert not [*(tmp_path / "run").glob("*.safetensors")]
    path = tmp_path / "run" / "metrics.jsonl"
    assert not path.exists() or not [r for r in read_metrics(path) if "reward" in r]
