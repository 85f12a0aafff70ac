"""What agents cost beside the engine and the user's code: below 2 ms a turn."""

from __future__ import annotations

import threading
import time

import psutil
import pytest

from openrlhf.rollout.agents.episode import EpisodeResult
from tests.rollout.agent_fakes import (
    StreamingEngine,
    act,
    make_runner,
    request,
    says,
    write_agent,
)

NUM_EPISODES, NUM_TURNS = 128, 8
WORDS = "The answer is not that one, so let us look at it once more and count. " * 2  # 140 tokens
AGENT = f"""
    from openrlhf.utils.agent import AgentInstanceBase

    class AgentInstance(AgentInstanceBase):
        def __init__(self):
            self.num_steps = 0

        async def step(self, states):
            self.num_steps += 1
            return {{
                "rewards": 0.5,
                "scores": 1.0,
                "environment_feedback": "Observation: 17 rows. Go on." * 4,
                "done": self.num_steps == {NUM_TURNS},
                "extra_logs": {{"num": self.num_steps}},
            }}
"""
MAX_OVERHEAD_MS = 2.0
NUM_AT_ONCE = 3000
# No episode ends before all of them have come to its first step.
ALL_AT_ONCE = f"""
    import asyncio
    from openrlhf.utils.agent import AgentInstanceBase

    THERE, ALL = [], asyncio.Event()

    class AgentInstance(AgentInstanceBase):
        async def step(self, states):
            THERE.append(1)
            if len(THERE) == {NUM_AT_ONCE}:
                ALL.set()
            await asyncio.wait_for(ALL.wait(), 15)
            return {{"rewards": 0.5, "environment_feedback": "", "done": True}}
"""


def cpu_s() -> float:
    """CPU seconds of this process and of the workers."""
    process = psutil.Process()
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


@pytest.mark.slow  # its limit is of a machine that does nothing else
def test_a_turn_of_an_environment_costs_less_than_two_milliseconds(tmp_path, tiny_tokenizer):
    engine = StreamingEngine(says(tiny_tokenizer, WORDS))
    runner = make_runner(
        write_agent(tmp_path, AGENT), engine, tiny_tokenizer, max_length=4096, num_tasks=1000
    )
    act(runner, [request(tiny_tokenizer, name="warm")])
    requests = [request(tiny_tokenizer, name=f"e{i}") for i in range(NUM_EPISODES)]
    began_s = cpu_s()
    results = act(runner, requests)
    overhead_ms = 1000 * (cpu_s() - began_s) / (NUM_EPISODES * NUM_TURNS)
    assert sum(result.num_turns for result in results.values()) == NUM_EPISODES * NUM_TURNS
    print(f"{overhead_ms:.2f} ms a turn")
    assert overhead_ms < MAX_OVERHEAD_MS
    runner.close()


def test_thousands_of_episodes_wait_at_once_without_threads_of_their_own(tmp_path, tiny_tokenizer):
    num_threads: list[int] = []
    num_before = threading.active_count()  # those that earlier tests of this process left

    class Watched(StreamingEngine):
        def submit(self, requests):
            num_threads.append(threading.active_count() - num_before)
            return super().submit(requests)

    file = write_agent(tmp_path, ALL_AT_ONCE)
    engine = Watched(says(tiny_tokenizer, WORDS))
    runner = make_runner(file, engine, tiny_tokenizer, num_tasks=NUM_AT_ONCE)
    process = psutil.Process()
    began_s, before = time.monotonic(), process.memory_info().rss
    results = act(runner, [request(tiny_tokenizer, name=f"e{i}") for i in range(NUM_AT_ONCE)])
    seconds, growth = time.monotonic() - began_s, process.memory_info().rss - before
    assert all(isinstance(result, EpisodeResult) for result in results.values())
    print(f"{seconds:.1f} s, {growth / 2**20:.0f} MiB, {max(num_threads)} threads")
    assert seconds < 20  # one after the other: over an hour
    assert growth < NUM_AT_ONCE * 100 * 2**10
    assert max(num_threads) < 40
    runner.close()
