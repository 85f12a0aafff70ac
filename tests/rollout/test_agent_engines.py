"""Episodes on real engines."""

import pytest

from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.rollout.engine_pool import BatchedEngine
from tests.engines.helpers import load, start
from tests.helpers.rollouts import largest_gap
from tests.rollout.agent_fakes import agents_over, prompts, settings

AGENT = """
    from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

    class AgentInstance(AgentInstanceBase):
        def __init__(self):
            self.num_steps = 0

        async def step(self, states):
            self.num_steps += 1
            states["sampling_params"].max_tokens = 8
            return {
                "rewards": 1.0,
                "environment_feedback": "<|end|><|user|>more<|end|><|assistant|>",
                "done": self.num_steps == 3,
            }

    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self):
            super().__init__(AgentInstance)

        async def execute(self, prompt, label, sampling_params, **more):
            sampling_params.max_tokens = 8  # or a turn could fill the context
            return await super().execute(prompt, label, sampling_params, **more)
"""


# No episode takes its second turn before all of them have taken their first.
def generate(folder, engines, tokenizer, **sampling):
    texts = ("one", "two", "three")
    with agents_over(engines, folder, tokenizer, code=AGENT, max_length=64, num_tasks=32) as agents:
        return agents.generate_samples(
            prompts(tokenizer, texts), settings(tokenizer, **sampling), tag="step1"
        ).rollouts


def check_rollouts(rollouts, model_dir, tokenizer) -> None:
    assert len(rollouts) == 6
    assert all(r.num_actions >= 3 and r.reward is not None for r in rollouts)
    assert max(len(r.token_ids) for r in rollouts) <= 64
    assert any(r.reward > 1.0 for r in rollouts)  # went on after feedback
    assert largest_gap(model_dir, rollouts, 0.8) < 1e-3
    assert largest_gap(model_dir, rollouts, 1.0) > 1e-2  # a forgotten temperature would be seen


def test_turns_of_a_transformers_engine_are_what_the_trainer_computes(
    tmp_path, tiny_model_dir, tiny_tokenizer
):
    engine = OwnGenerate(load(tiny_model_dir))
    engines = [BatchedEngine(engine.generate)]
    rollouts = generate(tmp_path, engines, tiny_tokenizer, num_samples=2, temperature=0.8)
    check_rollouts(rollouts, tiny_model_dir, tiny_tokenizer)


@pytest.fixture(scope="module")
def vllm_engine(tiny_model_dir):
    engine = start(tiny_model_dir)
    yield engine
    engine.shutdown()


@pytest.mark.slow
def test_turns_of_vllm_are_what_the_trainer_computes(
    tmp_path, vllm_engine, tiny_model_dir, tiny_tokenizer
):
    engines = [vllm_engine]
    rollouts = generate(tmp_path, engines, tiny_tokenizer, num_samples=2, temperature=0.8)
    check_rollouts(rollouts, tiny_model_dir, tiny_tokenizer)
