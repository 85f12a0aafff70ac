"""--agent_func_path through the commands: several turns, rewards of the agent's own."""

from pathlib import Path
from textwrap import dedent

import pytest

from openrlhf.cli import train_ppo
from tests.integration.commands import run_command, steps_of
from tests.rollout.agent_fakes import ENVIRONMENT, NEW, OPENAI_EXECUTOR, OWN_LOOP

OLD_FLAGS = (
    "--async_train --agent_func_path {agent} --advantage_estimator reinforce_baseline "
    "--n_samples_per_prompt 2 --vllm_num_engines 1 --enforce_eager --init_kl_coef 0 "
    "--rollout_batch_size 4 --train_batch_size 8 --micro_train_batch_size 4 --prompt_max_len 32 "
    "--generate_max_len 64 --max_samples 8 --pretrain {model} --prompt_data {data} "
    "--input_key input --label_key answer --save_path {out} --ckpt_path {out}/ckpt"
)
NEW_FLAGS = (
    "--train.agent_func_path {agent} --algo.advantage.estimator reinforce_baseline "
    "--rollout.n_samples_per_prompt 2 "
    "--algo.kl.init_coef 0 --rollout.batch_size 4 --train.batch_size 8 --train.micro_batch_size 4 "
    "--data.max_len 96 --data.max_samples 8 --actor.model_name_or_path {model} "
    "--data.prompt_dataset {data} --data.input_key input --data.label_key answer "
    "--ckpt.output_dir {out} --ckpt.path {out}/ckpt --train.colocate_all"
)
FILES = {
    "0.8, several turns, async": ("train_ppo_ray", ENVIRONMENT + dedent(OWN_LOOP), OLD_FLAGS, 3),
    "0.11, several turns": ("train_ppo", ENVIRONMENT + dedent(NEW), NEW_FLAGS, 3),
    "0.11, OpenAI server": ("train_ppo", f"START = 'thread'\n{OPENAI_EXECUTOR}", NEW_FLAGS, 2),
}


def command(name: str, model: Path, prompts: Path, folder: Path) -> tuple[str, list[str]]:
    """Module and words of a command, whose agent file lies in the folder."""
    module, code, flags, _ = FILES[name]
    (folder / "agent_func.py").write_text(code)
    places = {"model": model, "data": prompts, "out": folder / "run"}
    return module, flags.format(agent=folder / "agent_func.py", **places).split()


def check(name: str, folder: Path) -> None:
    steps = steps_of(folder / "run")
    assert len(steps) == 2
    assert 1 <= steps[0]["agent/num_turns"] <= FILES[name][3]
    assert steps[0]["vllm_kl"] < 1e-6
    assert not any(key.startswith("agent/num_failed") for step in steps for key in step)
    assert (folder / "run" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FILES)
def test_agent_commands_of_the_documents_run_from_a_shell(
    name: str, tiny_model_dir: Path, prompt_file: Path, tmp_path: Path
) -> None:
    module, words = command(name, tiny_model_dir, prompt_file, tmp_path)
    run_command("-m", f"openrlhf.cli.{module}", *words, timeout=800)
    check(name, tmp_path)


def test_an_agent_trains_the_policy_in_one_process(
    tiny_model_dir: Path, prompt_file: Path, tmp_path: Path
) -> None:
    name = "0.11, several turns"
    _, words = command(name, tiny_model_dir, prompt_file, tmp_path)
    train_ppo.main([*words, "--vllm_num_engines", "0"])
    check(name, tmp_path)
