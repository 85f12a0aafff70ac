"""Episodes on real engines, in this process and in others."""

from __future__ import annotations

import time

import pytest
import torch

from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.errors import EngineError
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.rollout.agents.episodes import agent_rollouts
from openrlhf.rollout.engine_pool import BatchSampler
from openrlhf.rollout.scoring import FailurePolicy
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.vllm_engine import RayEngine
from tests.engines.helpers import load
from tests.rollout.agent_fakes import (
    StreamingEngine,
    act_one,
    prompts,
    says,
    settings,
    setup_of,
    write_agent,
)
from tests.rollout.test_openai_server import agent_of

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
def generate(folder, samplers, tokenizer, *, texts=("one", "two", "three"), **sampling):
    setup = setup_of(write_agent(folder, AGENT), tokenizer, max_length=64, num_tasks=32)
    agents = agent_rollouts(setup, samplers, FailurePolicy(4))
    try:
        return agents.generate_samples(
            prompts(tokenizer, texts), settings(tokenizer, **sampling), tag="step1"
        ).rollouts
    finally:
        agents.loop.run(agents.actor.close())
        agents.loop.close()


def largest_gap(model_dir, rollouts, temperature) -> float:
    """The most that engine and trainer differ in the log-prob of a sampled token."""
    experience = Experience.from_rollouts(rollouts)
    actor = Actor(load_causal_lm(model_dir))
    with torch.no_grad():
        logprobs = actor(experience.packed(), temperature=temperature).logprobs
    return float((logprobs - experience.rollout_logprobs).abs().max())


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
    samplers = [BatchSampler(engine.generate)]
    rollouts = generate(tmp_path, samplers, tiny_tokenizer, num_samples=2, temperature=0.8)
    check_rollouts(rollouts, tiny_model_dir, tiny_tokenizer)


@pytest.fixture(scope="module")
def vllm_engine(tiny_model_dir):
    from openrlhf.engines.vllm_engine import VLLMEngine, VLLMEngineConfig

    engine = VLLMEngine(
        VLLMEngineConfig(str(tiny_model_dir), dtype="float32", max_model_len=512, max_num_seqs=32)
    )
    yield engine
    engine.shutdown()


@pytest.mark.slow
def test_turns_of_vllm_are_what_the_trainer_computes(
    tmp_path, vllm_engine, tiny_model_dir, tiny_tokenizer
):
    samplers = [vllm_engine]
    rollouts = generate(tmp_path, samplers, tiny_tokenizer, num_samples=2, temperature=0.8)
    check_rollouts(rollouts, tiny_model_dir, tiny_tokenizer)


@pytest.mark.slow
def test_vllm_answers_the_official_client_and_stops_when_it_leaves(
    tmp_path, vllm_engine, tiny_tokenizer
):
    body = """
stream = await chat.create(
    model=session.model, messages=talk, stream=True, max_tokens=300, logprobs=True)
pieces = [chunk async for chunk in stream]
tokens = [t for c in pieces if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
try:
    await chat.create(model=session.model, messages=talk, max_tokens=400, timeout=0.05)
except openai.APITimeoutError:
    return {"reward": 1.0, "extra_logs": {"tokens": len(tokens)}}
"""
    file = write_agent(tmp_path, "")
    file.write_text(agent_of(body))
    never_ends = {"stop_token_ids": ()}
    result = act_one(file, vllm_engine, tiny_tokenizer, max_length=500, sampling=never_ends)
    assert result.extra_logs["tokens"] == 300
    (segment,) = result.segments  # the turn that was left is not trained on
    assert (result.num_turns, sum(segment.action_mask)) == (1, 300)
    deadline = time.monotonic() + 5
    while vllm_engine.llm.has_unfinished_requests() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not vllm_engine.llm.has_unfinished_requests()


class FakeActor(StreamingEngine):
    """An engine actor that writes one word, whatever it is asked."""

    def __init__(self, tokenizer: object) -> None:
        super().__init__(says(tokenizer, "yo"))

    def num_requests(self) -> int:
        return len(self.requests)


@pytest.mark.slow
def test_agents_act_on_engines_of_other_processes(ray_cluster, tmp_path, tiny_tokenizer):
    import ray

    kind = ray.remote(FakeActor).options(max_concurrency=8)
    handles = [kind.remote(tiny_tokenizer) for _ in range(2)]
    samplers = [RayEngine(handle, f"engine-{k}") for k, handle in enumerate(handles)]
    texts = [f"p{i}" for i in range(12)]
    rollouts = generate(tmp_path, samplers, tiny_tokenizer, texts=texts, num_samples=2)
    assert len(rollouts) == 24
    for rollout in rollouts:
        turn = "yo<|end|>"
        more = "<|end|><|user|>more<|end|><|assistant|>"
        assert rollout.response_text == turn + (more + turn) * 2
        assert rollout.reward == 3.0
    asked = ray.get([handle.num_requests.remote() for handle in handles])
    assert sum(asked) == 72 and min(asked) > 0
    ray.kill(handles[0])
    with pytest.raises(EngineError, match="engine-0 died"):
        generate(tmp_path, samplers, tiny_tokenizer, texts=texts, num_samples=2)
    ray.kill(handles[1])
