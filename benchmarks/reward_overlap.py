"""What a slow reward adds to generation: fake engines that finish requests evenly, real workers.

Both sides are waits, so that the answer is about overlap and not about this machine's cores. The
step is 128 samples of 32 prompts from two engines; the reward sleeps for each sample.

    python -m benchmarks.reward_overlap --reward-ms 50 --generation-s 6 --micro-rollout-batch-size 4
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.rewards.process_pool import FunctionPool, PoolSettings
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ppo_utils.scoring import GroupScorer, SourceScorer
from openrlhf.trainer.ray.vllm_engine import EnginePool

NUM_PROMPTS, NUM_SAMPLES = 32, 4
REWARD = """
import time

def reward_func(queries, prompts, labels):
    time.sleep({seconds} * len(queries))
    return [1.0] * len(queries)
"""


class PacedEngine:
    """Finishes one request after the other, evenly over a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
        """A future for each request."""
        futures: list[Future[list[Completion]]] = [Future() for _ in requests]

        def work() -> None:
            for request, future in zip(requests, futures, strict=True):
                time.sleep(self.seconds / len(requests))
                one = Completion((5, 1), (0.0, 0.0), "stop", weight_version=0)
                future.set_result([one] * request.sampling.num_samples)

        threading.Thread(target=work).start()
        return futures


@dataclass(frozen=True)
class Prompt:
    """What the generator reads of a prompt."""

    row_id: int
    prompt_token_ids: tuple[int, ...] = (3, 4)
    prompt_text: str = "p"
    label: object = None
    datasource: str = "default"
    columns: dict[str, object] = field(default_factory=dict)


class Words:
    """A tokenizer that only writes."""

    def batch_decode(self, rows: Sequence[object], **options: object) -> list[str]:
        """The same text for every row."""
        return ["text"] * len(rows)


def step_seconds(folder: Path, reward_s: float, arguments: argparse.Namespace) -> float:
    """Generation and reward of one step, after a first one that starts the workers."""
    path = folder / f"reward_{reward_s * 1000:.0f}.py"
    path.write_text(REWARD.format(seconds=reward_s))
    batch_size = arguments.micro_rollout_batch_size
    pool = FunctionPool(
        path, PoolSettings(batch_size=batch_size, num_workers=arguments.num_workers)
    )
    engines = [PacedEngine(arguments.generation_s), PacedEngine(arguments.generation_s)]
    generator = SamplesGenerator(
        EnginePool(engines),  # type: ignore[arg-type]
        GroupScorer(SourceScorer(pool, batch_size)),
        Words(),  # type: ignore[arg-type]
        vocab_size=10,
    )
    sampling = SamplingSettings(num_samples=NUM_SAMPLES)
    seconds = 0.0
    for _ in range(2):
        start = time.monotonic()
        prompts = [Prompt(row) for row in range(NUM_PROMPTS)]
        generator.generate_samples(prompts, sampling, tag="t")  # type: ignore[arg-type]
        seconds = time.monotonic() - start
    pool.close()
    return seconds


def main() -> None:
    """Measure without and with the reward, and say the difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reward-ms", type=float, default=50)
    parser.add_argument("--generation-s", type=float, default=6)
    parser.add_argument("--micro-rollout-batch-size", type=int, default=4)
    parser.add_argument("--num-workers", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        without = step_seconds(Path(folder), 0.0, arguments)
        slow = step_seconds(Path(folder), arguments.reward_ms / 1000, arguments)
    print(
        f"{NUM_PROMPTS * NUM_SAMPLES} samples: {without:.2f} s without, {slow:.2f} s with "
        f"{arguments.reward_ms:g} ms a sample, {100 * (slow / without - 1):+.1f} %"
    )


if __name__ == "__main__":
    main()
