"""What agents cost a turn, beside the engine and the user's code.

The same turns are taken on the same vLLM engine three ways: asked of the engine directly; by an
environment that does nothing (--agent_func_path); by the official OpenAI client over the loopback
server. Every turn samples as many tokens, so what the second takes longer is the agents' part; what
the third takes longer is the server's and the client's. Leave the machine idle meanwhile.

    python -m benchmarks.agent_overhead [--episodes 64] [--turns 8]
"""

import argparse
import asyncio
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

NUM_NEW_TOKENS = 16  # of a turn
PROMPT = "Count the rows of the table and say how many there are."
FEEDBACK = "Observation: 17 rows. Go on and look at them once more."
GOAL_MS = 2.0
NAMES = ("wall_ms", "cpu_ms")  # of a Cost
ENVIRONMENT = {
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "10000",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
ENVIRONMENT_AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.num_steps = 0

    async def step(self, states):
        self.num_steps += 1
        return {{
            "rewards": 0.5,
            "scores": 1.0,
            "environment_feedback": {feedback!r},
            "done": self.num_steps == {num_turns},
            "extra_logs": {{"num": self.num_steps}},
        }}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)

    async def execute(self, prompt, label, sampling_params, **more):
        sampling_params.max_tokens = {num_new_tokens}
        return await super().execute(prompt, label, sampling_params, **more)
"""
CLIENT_AGENT = """
import openai
from openrlhf.utils.agent import OpenAIAgentExecutor

class AgentExecutor(OpenAIAgentExecutor):
    client = None

    async def run(self, session, prompt, label):
        if AgentExecutor.client is None:
            AgentExecutor.client = openai.AsyncOpenAI(base_url=session.base_url, api_key="-")
        chat = AgentExecutor.client.with_options(api_key=session.api_key).chat.completions
        talk = [{{"role": "user", "content": prompt}}]
        for _ in range({num_turns}):
            answer = await chat.create(
                model=session.model, messages=talk, max_tokens={num_new_tokens}
            )
            said = answer.choices[0].message
            talk.append({{"role": "assistant", "content": said.content}})
            talk.append({{"role": "user", "content": {feedback!r}}})
        return {{"reward": 0.5}}
"""


@dataclass(frozen=True)
class Cost:
    """What a round took, by turn."""

    wall_ms: float
    cpu_ms: float  # of this process, the engine's too, and of the workers


class Bench:
    """An engine and the ways to take turns on it."""

    def __init__(self, folder: Path, num_episodes: int, num_turns: int) -> None:
        from transformers import AutoTokenizer

        from openrlhf.engines.vllm_engine import VLLMEngine
        from tests.tiny import make_model

        model = make_model(folder / "model")
        self.num_episodes, self.num_turns = num_episodes, num_turns
        self.max_length = 96 + num_turns * (NUM_NEW_TOKENS + 2 * len(FEEDBACK))
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        settings = {"dtype": "float32", "max_model_len": self.max_length, "max_num_seqs": 256}
        self.engine = VLLMEngine({"model": str(model), **settings})
        self.environment = self._runner(folder / "environment.py", ENVIRONMENT_AGENT)
        self.client = self._runner(folder / "client.py", CLIENT_AGENT)

    def _runner(self, path: Path, code: str) -> Any:
        from openrlhf.rollout.agents.episode import AgentSetup
        from openrlhf.rollout.agents.episodes import agent_rollout_maker
        from openrlhf.rollout.scoring import FailurePolicy

        words = {"num_turns": self.num_turns, "num_new_tokens": NUM_NEW_TOKENS}
        path.write_text(code.format(feedback=FEEDBACK, **words))
        setup = AgentSetup(
            str(path),
            self.tokenizer,
            len(self.tokenizer),
            self.max_length,
            num_tasks=self.num_episodes,
        )
        return agent_rollout_maker(setup, [self.engine], FailurePolicy(1))

    def ask_engine(self) -> None:
        """The turns without agents: each prompt is the last one, its answer and the feedback."""
        from openrlhf.engines.base import GenerationRequest, SamplingSettings

        sampling = SamplingSettings(max_new_tokens=NUM_NEW_TOKENS)
        feedback = self.tokenizer.encode(FEEDBACK, add_special_tokens=False)
        prompt = self.tokenizer.encode(PROMPT, add_special_tokens=False)
        prompts = [list(prompt) for _ in range(self.num_episodes)]
        done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

        def ask(k: int) -> None:
            request = GenerationRequest(f"{k}/{len(prompts[k])}", tuple(prompts[k]), sampling)
            [future] = self.engine.submit([request])
            future.add_done_callback(lambda answer: done.put((k, answer)))

        turns_left = [self.num_turns] * self.num_episodes
        for k in range(self.num_episodes):
            ask(k)
        while any(turns_left):
            k, answer = done.get()
            [completion] = answer.result()
            prompts[k] += [*completion.token_ids, *feedback]
            turns_left[k] -= 1
            if turns_left[k]:
                ask(k)

    def act(self, agents: Any) -> None:
        """The same turns by agents."""
        from openrlhf.engines.base import SamplingSettings
        from openrlhf.rollout.agents.episode import EpisodeRequest
        from openrlhf.utils.metrics import Metrics
        from openrlhf.utils.rollout import PromptRecord

        ids = tuple(self.tokenizer.encode(PROMPT, add_special_tokens=False))

        async def all_of_them() -> list[Any]:
            requests = [
                EpisodeRequest(f"e{k}", PromptRecord(0, PROMPT, ids), SamplingSettings())
                for k in range(self.num_episodes)
            ]
            return await asyncio.gather(*(agents.actor.run(one, Metrics()) for one in requests))

        for result in agents.loop.run(all_of_them()):
            assert result.num_turns == self.num_turns

    def cost_of(self, call: Callable[[], None]) -> Cost:
        """Time of a round, by turn."""
        num_turns = self.num_episodes * self.num_turns
        cpu_s, wall_s = all_cpu_s(), time.monotonic()
        call()
        wall_s, cpu_s = time.monotonic() - wall_s, all_cpu_s() - cpu_s
        return Cost(1000 * wall_s / num_turns, 1000 * cpu_s / num_turns)

    def round(self) -> tuple[Cost, Cost, Cost]:
        """The three ways, one after the other."""
        return (
            self.cost_of(self.ask_engine),
            self.cost_of(lambda: self.act(self.environment)),
            self.cost_of(lambda: self.act(self.client)),
        )

    def close(self) -> None:
        """End everything."""
        for runner in (self.environment, self.client):
            runner.close()
        self.engine.shutdown()


def all_cpu_s() -> float:
    """CPU seconds of this process and of those it has started."""
    process = psutil.Process()
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def main() -> None:
    """Measure and compare with the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=64, help="that run at once")
    parser.add_argument("--turns", type=int, default=8, help="of an episode")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.episodes, args.turns)
        bench.round()
        rounds = [bench.round() for _ in range(args.rounds)]
        bench.close()
    for k, what in enumerate(("the engine alone", "an environment", "the OpenAI client")):
        wall, cpu = (statistics.median(getattr(r[k], n) for r in rounds) for n in NAMES)
        print(f"{what:<18}{wall:6.2f} ms of wall time and {cpu:6.2f} ms of CPU a turn")
    more_wall, more_cpu = (
        statistics.median(getattr(r[1], n) - getattr(r[0], n) for r in rounds) for n in NAMES
    )
    say("an environment's turn beside engine and user code, wall time", more_wall)
    say("an environment's turn beside engine and user code, CPU time", more_cpu)


def say(what: str, value_ms: float) -> None:
    """One number against the goal."""
    mark = "ok" if value_ms < GOAL_MS else "MISSED"
    print(f"{what}: {value_ms:.2f} ms  goal < {GOAL_MS:g}  {mark}")


if __name__ == "__main__":
    main()
