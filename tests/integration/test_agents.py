"""--agent_func_path through the commands: several turns, rewards of the agent's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.cli import train_ppo, train_ppo_ray
from openrlhf.utils.tracking import read_metrics
from tests.integration.commands import argv

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
