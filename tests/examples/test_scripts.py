"""Every example script's command line is understood, as it stands and through its variables."""

import os
import stat
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from openrlhf.config.base import CommandConfig
from openrlhf.config.cli import parse_config
from openrlhf.config.supervised import SupervisedConfig
from tests.helpers.scripts import LOOPS, SCRIPTS, TRAINING_SCRIPTS

# Stands for `python` and `torchrun`: notes its words, one call a file, named by its time. A server
# is ready once it is noted.
RECORDER = r"""#!/bin/sh
printf "%s\n" "$@" > "$RECORD/$(date +%s%N)-$$"
case "$2" in *'"/ready"'*)
    until grep -qs openrlhf.cli.serve_rm "$RECORD"/*; do sleep 0.01; done
esac
"""


@pytest.fixture
def run_script(tmp_path):
    """Runs a script whose commands only note their words, and returns the words of each call."""
    for name in ("python", "torchrun"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        path = tmp_path / "bin" / name
        path.write_text(RECORDER)
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
    record = tmp_path / "record"
    record.mkdir()

    def run(name: str, **variables: str) -> list[list[str]]:
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "RECORD": str(record), **variables}
        subprocess.run(["bash", SCRIPTS / name], env=env, check=True, timeout=60)
        return [path.read_text().splitlines() for path in sorted(record.iterdir())]

    return run


def parse(words: list[str]) -> CommandConfig:
    """The config of the command after `-m`; ConfigError when it could not be run."""
    at = words.index("-m") + 1
    config_class = import_module(words[at]).main.config_class
    return parse_config(config_class, words[at + 1 :]).config


# What users' documents call examples/scripts.
NAMES_IN_DOCUMENTS = [
    "nvidia_docker_install.sh",
    "reward_func.py",
    "train_conditional_llama.sh",
    "train_dpo_llama.sh",
    "train_dpo_ring_llama.sh",
    "train_iterative_dpo_llama.sh",
    "train_knowledge_distillation.sh",
    "train_kto_llama.sh",
    "train_llama_slurm.sh",
    "train_ppo_llama_ray.sh",
    "train_ppo_llama_ray_70b.sh",
    "train_ppo_llama_ray_hybrid_engine.sh",
    "train_ppo_llama_ray_slurm.sh",
    "train_ppo_llama_with_reward_fn.sh",
    "train_ppo_ray_hybrid_engine.sh",
    "train_ppo_with_reward_fn.sh",
    "train_prm_mistral.sh",
    "train_reinforce_baseline_hybrid_engine.sh",
    "train_reinforce_baseline_llama_ray_agent_async.sh",
    "train_reinforce_baseline_llama_ray_async.sh",
    "train_reinforce_baseline_ray_agent_async.sh",
    "train_reinforce_llama_ray.sh",
    "train_reinforce_llama_ray_hybrid_engine.sh",
    "train_rejection_sampling_llama.sh",
    "train_sft_llama_tensor_parallelism.sh",
    "train_sft_mixtral_lora.sh",
    "../test_scripts/train_sft_mixtral_lora.sh",
]


@pytest.mark.parametrize("name", NAMES_IN_DOCUMENTS)
def test_scripts_that_documents_name_are_there(name):
    assert (SCRIPTS / name).is_file()


@pytest.mark.parametrize("name", TRAINING_SCRIPTS)
def test_a_script_is_one_command_that_its_variables_and_extra_flags_change(
    run_script, name, tmp_path
):
    extra = "--seed 7 --train_batch_size 16 --micro_train_batch_size 4"
    if any(word in name for word in ("ppo", "hybrid", "async", "agent", "reinforce")):
        extra += " --rollout_batch_size 16"
    [plain] = run_script(name, OUT=str(tmp_path / "run"))
    assert parse(plain).ckpt.output_dir == str(tmp_path / "run")
    *_, words = run_script(name, MODEL=str(tmp_path), GPUS="1", EXTRA_ARGS=extra)
    config = parse(words)
    assert (config.train.seed, config.train.batch_size) == (7, 16)
    model = config.model if isinstance(config, SupervisedConfig) else config.actor
    assert model.model_name_or_path == str(tmp_path)


@pytest.mark.parametrize("name", sorted(LOOPS))
def test_an_offline_loop_is_commands_that_are_understood(run_script, name, tmp_path):
    calls = run_script(name, OUT=str(tmp_path), ITERATIONS="2", DATA="rows.jsonl", GPUS="2")
    for words, expected in zip(calls, LOOPS[name], strict=True):
        config = parse(words)
        assert expected in (getattr(config, "eval_task", None), words[words.index("-m") + 1])
        assert (words[0] == "--standalone") == (expected != "generate_vllm")


def test_a_step_whose_adapter_is_there_is_skipped(run_script, tmp_path):
    first = run_script("train_iterative_dpo_llama.sh", OUT=str(tmp_path), ITERATIONS="1", GPUS="1")
    trained = Path(parse(first[-1]).ckpt.output_dir)
    trained.mkdir(parents=True)
    (trained / "adapter_config.json").write_text("{}")
    again = run_script("train_iterative_dpo_llama.sh", OUT=str(tmp_path), ITERATIONS="1", GPUS="1")
    assert not any("openrlhf.cli.train_dpo" in words for words in again[len(first) :])
    assert len(again) == 2 * len(first) - 1


def test_a_reward_server_is_started_asked_and_trained_against(run_script, tmp_path):
    variables = {"REWARD_MODEL": str(tmp_path / "rm"), "PORT": "5123", "SERVER_GPUS": "7"}
    calls = run_script("serve_remote_rm.sh", OUT=str(tmp_path / "run"), **variables)
    # The server runs beside the others.
    (server,) = [parse(words) for words in calls if "openrlhf.cli.serve_rm" in words]
    trainer = parse(calls[-1])
    assert len(calls) == 3 and "/ready" in "".join(next(c for c in calls if c[0] == "-c"))
    assert (server.port, server.reward.model_name_or_path) == (5123, str(tmp_path / "rm"))
    assert trainer.reward.remote_url == "http://127.0.0.1:5123/get_reward"


def test_the_demo_makes_warms_up_trains_and_reports(run_script, tmp_path):
    calls = run_script("demo.sh", OUT=str(tmp_path / "demo"), SEED="3")
    assert [call[0] for call in calls] == [
        "examples/python/make_demo.py",
        "-m",
        "-m",
        "-m",
    ]
    assert [parse(call).train.seed for call in calls[1:3]] == [3, 3]
    assert parse(calls[3]).runs == (str(tmp_path / "demo" / "rl"),)
