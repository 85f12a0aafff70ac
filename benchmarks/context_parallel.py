"""Memory and time of a training step on one long row that ranks share: `--ring_attn_size` 1 to N.

    python -m benchmarks.context_parallel --num-tokens 65536 --sizes 1 4
    python -m benchmarks.context_parallel --num-tokens 16384 --sizes 1 2 --mode ulysses

Every size runs in processes of its own, with all cores shared among its ranks. Activations of a
rank are what its resident memory rises by in the forward and backward pass, at its highest.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.logprob_memory import Stretch
from openrlhf.config.common import DeepSpeedConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.utils.packing import PackedBatch
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model


class Step(NamedTuple):
    """What one rank saw in one step."""

    seconds: float
    activations_mib: float
    loss: float  # the same for every size


def one_step(folder: Path) -> Step:
    """A forward and a backward pass over one row, after a short one that loads what is loaded."""
    size, num_tokens = int(os.environ["WORLD_SIZE"]), int(os.environ["NUM_TOKENS"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    mode = os.environ["CP_MODE"]
    strategy = DeepSpeedStrategy(DeepSpeedConfig(ring_attn_size=size, cp_mode=mode))
    strategy.setup()
    actor = Actor(load_causal_lm(folder / "model"))
    actor.context = strategy.context

    def run(count: int) -> float:
        ids = torch.arange(count) % 250 + 6
        batch = PackedBatch.from_sequences([ids], [torch.arange(count) > 0])
        loss = -actor(batch).logprobs.mean()
        loss.backward()
        actor.zero_grad(set_to_none=False)
        return loss.item()

    run(64)
    torch.distributed.barrier()
    with Stretch() as stretch:
        loss = run(num_tokens)
        torch.distributed.barrier()
    return Step(stretch.seconds, stretch.extra_mib, loss)


def main() -> None:
    """Measure the sizes one after the other and print each beside the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-tokens", type=int, default=65_536)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--mode", choices=("ring", "ulysses"), default="ring")
    args = parser.parse_args()
    os.environ.update(NUM_TOKENS=str(args.num_tokens), CP_MODE=args.mode)
    # Map and unmap every tensor by itself: glibc would keep those of 8 to 32 MiB in its heap after
    # they are freed, and they are no activations.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(
            folder / "model",
            hidden_size=128,
            num_heads=4,
            num_kv_heads=4,
            intermediate_size=2048,  # of 128 bytes 1 is of a key head, in an 8B model of 224
            max_position_embeddings=args.num_tokens,
        )
        first: Step | None = None
        for size in args.sizes:
            steps: list[Step] = run_ranks(one_step, size, folder)  # type: ignore[assignment]
            worst = Step(*map(max, zip(*steps, strict=True)))
            first = first or worst
            print(
                f"{size} rank(s), {args.mode}, {args.num_tokens} tokens: "
                f"{worst.activations_mib:,.0f} MiB a rank "
                f"({worst.activations_mib / first.activations_mib:.2f} of the first), "
                f"{worst.seconds:.1f} s ({worst.seconds / first.seconds:.2f}), "
                f"loss {worst.loss:.6f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
