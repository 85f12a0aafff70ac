"""--agent_func_path through the commands: several turns, rewards of the agent's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from openrlhf.cli import train_ppo, train_ppo_ray
from openrlhf.utils.tracking import read_metrics
from tests.integration.commands import argv
from tests.rollout.agent_files import OPENAI_EXECUTOR
from tests.rollout.test_agent_files import ENV, NEW, OWN_LOOP

AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.num_turns = 0

    async def reset(self, states):
        return {"observation": states["observation"]}

    async def step(self, states):
        self.num_turns += 1
        reward = sum(map(ord, states["action_text"])) % 7 / 7
        return {
            "rewards": reward,
            "scores": min(reward, 1.0),
            "environment_feedback": " again:",
            "done": self.num_turns == 2,
            "extra_logs": {"num_turns": self.num_turns},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)

    async def execute(self, prompt, label, sampling_params, **more):
        sampling_params.max_tokens = 6
        return await super().execute(prompt, label, sampling_params, **more)
"""


def command(folder: Path, model: Path, prompts: Path) -> list[str]:
    agent = folder / "agent.py"
    agent.write_text(AGENT)
    return argv(
        "--advantage_estimator group_norm --n_samples_per_prompt 2 --init_kl_coef 0 "
        "--generate_max_len 24 --reward_clip_range -10 10",
        pretrain=model,
        prompt_data=prompts,
        agent_func_path=agent,
        save_path=folder / "run",
    )


def check(folder: Path) -> None:
    steps = [r for r in read_metrics(folder / "run" / "metrics.jsonl") if "reward" in r]
    assert len(steps) == 2
    for step in steps:
        assert step["extra/num_turns"] == 2
        assert step["vllm_kl"] < 1e-6 and step["logprobs_diff_max"] < 1e-3
    assert (folder / "run" / "model.safetensors").exists()


def test_an_agent_trains_the_policy_in_one_process(
    tiny_model_dir: Path, prompt_file: Path, tmp_path: Path
) -> None:
    train_ppo.main(command(tmp_path, tiny_model_dir, prompt_file))
    check(tmp_path)


@pytest.mark.slow
def test_agents_act_beside_vllm_engines_on_ray(
    tiny_model_dir: Path, prompt_file: Path, tmp_path: Path, ray_cluster: None
) -> None:
    train_ppo_ray.main(command(tmp_path, tiny_model_dir, prompt_file))
    check(tmp_path)


def test_a_file_without_an_agent_is_one_line(
    tiny_model_dir: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(tmp_path, tiny_model_dir, prompt_file)
    (tmp_path / "agent.py").write_text("x = 1\n")
    with pytest.raises(SystemExit) as stopped:
        train_ppo.main(words)
    assert stopped.value.code == 2
    assert "has no AgentExecutor; found: nothing public" in capsys.readouterr().err


ONE_TURN = """
from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(
        self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None
    ):
        ids = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        sampling_params.max_tokens = min(sampling_params.max_tokens, 8)
        result = await llm_engine.generate(ids, sampling_params)
        output = result.outputs[0]
        reward = sum(map(ord, output.text)) % 8 / 8
        return {
            "prompt": prompt,
            "label": label,
            "reward": reward,
            "scores": reward,
            "extra_logs": {"has_label": float(label.isdigit())},
            "observation_tokens": ids + list(output.token_ids),
            "action_ranges": [(len(ids), len(ids) + len(output.token_ids))],
        }
"""
# The environment counts its turns; what is rewarded differs from sample to sample.
ENVIRONMENT = (
    dedent(ENV)
    .replace(' == "L"', "")
    .replace('"rewards": 0.25', '"rewards": sum(map(ord, states["action_text"])) % 8 / 8')
)
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
    "0.11, one turn": ("train_ppo", ONE_TURN, NEW_FLAGS, 1),
    "0.11, OpenAI server": ("train_ppo", f"START = 'thread'\n{OPENAI_EXECUTOR}", NEW_FLAGS, 2),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FILES)
def test_agent_commands_of_the_documents_run_from_a_shell(
    name: str, tiny_model_dir: Path, prompt_file: Path, tmp_path: Path
) -> None:
    module, code, flags, most_turns = FILES[name]
    (tmp_path / "agent_func.py").write_text(code)
    places = {"model": tiny_model_dir, "data": prompt_file, "out": tmp_path / "run"}
    line = flags.format(agent=tmp_path / "agent_func.py", **places)
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-m", f"openrlhf.cli.{module}", *line.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    steps = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in r]
    assert len(steps) == 2
    assert 1 <= steps[0]["agent/num_turns"] <= most_turns
    assert steps[0]["vllm_kl"] < 1e-6
    assert not any(key.startswith("agent/num_failed") for step in steps for key in step)
    assert (tmp_path / "run" / "model.safetensors").exists()
