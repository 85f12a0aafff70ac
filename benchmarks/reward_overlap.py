"""What a slow reward adds to generation: real worker processes, and vLLM or engines that only wait.

A step is 128 samples of 32 prompts; the reward sleeps for each sample. vLLM samples a random model
whose responses end by chance, so that lengths spread as they do in training. With --engine paced
two fake engines finish requests evenly: that leaves this machine's cores out of the answer.

    python -m benchmarks.reward_overlap --reward-ms 50 --micro-rollout-batch-size 4
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.workload import make_workload, prompt_token_ids
from openrlhf.engines.base import SamplingSettings
from openrlhf.engines.vllm_engine import VLLMEngine, VLLMEngineConfig
from openrlhf.rewards.process_pool import FunctionPool, PoolSettings
from tests.trainer.paced import PacedEngine, Prompt, step_seconds

NUM_PROMPTS, NUM_SAMPLES = 32, 4
PACED_S = 6.0
END_IDS = tuple(range(300, 324))  # of 2048: a response has 85 tokens in the mean
REWARD = """
import time

def reward_func(queries, prompts, labels):
    time.sleep({seconds} * len(queries))
    return [1.0] * len(queries)
"""
Step = Callable[[FunctionPool], float]  # reward -> seconds


def paced_step(batch_size: int) -> Step:
    """A step of fake engines."""
    engines = [PacedEngine(PACED_S), PacedEngine(PACED_S)]
    prompts = [Prompt(row) for row in range(NUM_PROMPTS)]
    sampling = SamplingSettings(num_samples=NUM_SAMPLES)
    return lambda pool: step_seconds(engines, pool, prompts, sampling, batch_size=batch_size)


def vllm_step(batch_size: int, folder: Path, max_new_tokens: int, hidden_size: int) -> Step:
    """A step of vLLM."""
    workload = make_workload(folder, max_new_tokens=max_new_tokens, hidden_size=hidden_size)
    config = VLLMEngineConfig(
        str(workload.model), dtype="float32", max_model_len=max_new_tokens + 32, max_num_seqs=128
    )
    engine = VLLMEngine(config)
    ids = [tuple(row) for row in prompt_token_ids()] * 2
    prompts = [Prompt(row, ids[row]) for row in range(NUM_PROMPTS)]
    sampling = SamplingSettings(
        num_samples=NUM_SAMPLES, max_new_tokens=max_new_tokens, stop_token_ids=END_IDS
    )
    return lambda pool: step_seconds([engine], pool, prompts, sampling, batch_size=batch_size)


def measure(step: Step, pools: Sequence[FunctionPool], num_rounds: int) -> list[list[float]]:
    """Seconds of steps for every reward in turn; a first round warms up."""
    rounds = [[step(pool) for pool in pools] for _ in range(num_rounds + 1)]
    return [list(times) for times in zip(*rounds[1:], strict=True)]


def shown(times: Sequence[float]) -> str:
    """Mean and range."""
    return f"{statistics.mean(times):.2f} s ({min(times):.2f} to {max(times):.2f})"


def main() -> None:
    """Measure without and with the reward, and say the difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["vllm", "paced"], default="vllm")
    parser.add_argument("--reward-ms", type=float, default=50)
    parser.add_argument("--micro-rollout-batch-size", type=int, default=4)
    parser.add_argument("--num-workers", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, size = Path(name), args.micro_rollout_batch_size
        step = (
            paced_step(size)
            if args.engine == "paced"
            else vllm_step(size, folder, args.max_new_tokens, args.hidden_size)
        )
        pools = []
        for seconds in (0.0, args.reward_ms / 1000):
            path = folder / f"reward_{seconds * 1000:.0f}.py"
            path.write_text(REWARD.format(seconds=seconds))
            pools.append(FunctionPool(path, PoolSettings(size, args.num_workers)))
        without, slow = measure(step, pools, args.rounds)
        for pool in pools:
            pool.close()
    print(
        f"{args.engine}, {NUM_PROMPTS * NUM_SAMPLES} samples: {shown(without)} without, "
        f"{shown(slow)} with {args.reward_ms:g} ms a sample, "
        f"{100 * (statistics.mean(slow) / statistics.mean(without) - 1):+.1f} %"
    )


if __name__ == "__main__":
    main()
