"""All ratios on this machine, side by side: `python -m benchmarks.run [--rounds 2] [--without-trl]
[--only-trl]`.

Leave the machine idle meanwhile. Goals are those the project has set itself; a ratio that misses
its goal is marked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

TRL_MICRO_BATCHES = (4, 8, 16)  # and the whole batch
ROWS_A_STEP = 64  # of benchmarks.supervised
COMPLETIONS_A_STEP, HIDDEN_SIZE = 128, 256  # of benchmarks.workload
# Both sides of every ratio get the same.
THREADS = {
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "10000",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}


def measure(name: str, folder: Path, *arguments: int, module: str = "measures") -> dict[str, float]:
    """Run one measurement in a process of its own."""
    words = [sys.executable, "-m", f"benchmarks.{module}", name, str(folder)]
    words += map(str, arguments)
    result = subprocess.run(
        words, capture_output=True, text=True, env=os.environ | THREADS, check=False
    )
    for line in result.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"{name} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")


def fastest(try_one: Callable[[int], float], whole: int) -> int:
    """Return the micro-batch with which TRL takes least, of 4, 8, 16 and the `whole` batch.

    Rows of very different lengths are padded less in small ones, and the kernels are better used
    in large ones: which wins differs from case to case.
    """
    return min((*TRL_MICRO_BATCHES, whole), key=try_one)


def named(micro_batch: int, whole: int) -> str:
    """Return the words for a micro-batch of TRL's."""
    return f"TRL's micro-batch: {'all' if micro_batch == whole else micro_batch}"


class Bench:
    """Keeps the median of every measurement over alternating rounds."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.missed = 0

    def both(self, ours: str, theirs: str, *arguments: int) -> tuple[float, float]:
        """Median seconds of two measurements, taken in turns."""
        pairs = [
            (
                measure(ours, self.folder, *arguments)["seconds"],
                measure(theirs, self.folder, *arguments)["seconds"],
            )
            for _ in range(self.rounds)
        ]
        first, second = zip(*pairs, strict=True)
        return statistics.median(first), statistics.median(second)

    def say(self, what: str, ratio: float, goal: float, detail: str, *, at_most: bool) -> None:
        """Print one ratio against its goal."""
        is_met = ratio <= goal if at_most else ratio >= goal
        self.missed += not is_met
        sign = "<=" if at_most else ">="
        mark = "ok" if is_met else "MISSED"
        print(f"{what:<52}{ratio:>7.2f}  goal {sign} {goal:<5} {mark:<7} {detail}", flush=True)


def compare_memory(bench: Bench) -> None:
    """Peak memory of log-probs over a large vocabulary against one chunk of logits in fp32."""
    num_tokens, vocab_size, chunk_tokens = 2048, 152_000, 1024
    words = [sys.executable, "-m", "benchmarks.logprob_memory", "--variant", "chunked"]
    words += ["--num-tokens", str(num_tokens), "--vocab-size", str(vocab_size)]
    result = subprocess.run(words, capture_output=True, text=True, env=os.environ | THREADS)
    if result.returncode:
        raise SystemExit(f"logprob_memory failed:\n{result.stderr[-4000:]}")
    found = json.loads(result.stdout)
    forward, backward = found["forward_mib"], found["backward_mib"]
    bound = chunk_tokens * vocab_size * 4 / 2**20
    detail = f"forward {forward:.0f}, backward {backward:.0f}, chunk {bound:.0f} MiB"
    what = f"log-prob peak memory / 1 chunk, V={vocab_size:,}"
    bench.say(what, max(forward, backward) / bound, 1.0, detail, at_most=True)


def compare_all_with_trl(bench: Bench) -> None:
    """Supervised trainers and whole steps."""
    for kind in ("sft", "dpo", "rm"):
        compare_supervised(bench, kind)
    for max_new_tokens, goal in ((64, 1.2), (256, 1.5)):
        compare_with_trl(bench, max_new_tokens, goal)


def run(bench: Bench) -> None:
    """All benchmarks without TRL."""
    compare_memory(bench)
    ours, plain = bench.both("generate_vllm", "generate_plain", 64)
    tokens = 128 * 64
    detail = f"{tokens / ours:.0f} against {tokens / plain:.0f} tokens/s"
    bench.say("generation: our vLLM engine / vllm.LLM", plain / ours, 0.9, detail, at_most=False)
    own = measure("generate_hf", bench.folder, 64)["seconds"]
    print(f"{'generation: the policy itself (no vLLM)':<52}         {tokens / own:.0f} tokens/s")

    trained, bare = bench.both("train_policy", "train_bare", 64)
    detail = f"{128 * 80 / trained:.0f} against {128 * 80 / bare:.0f} tokens/s"
    bench.say("training: our update / bare loop", bare / trained, 0.9, detail, at_most=False)

    for hidden_size in (256, 2048):
        sync, copy = bench.both("weight_sync", "memory_copy", 64, hidden_size)
        detail = f"hidden {hidden_size}: {sync * 1e3:.1f} against {copy * 1e3:.1f} ms"
        bench.say("weight sync / memory copy", sync / copy, 5.0, detail, at_most=True)
        reload = measure("vllm_reload", bench.folder, 64, hidden_size)["seconds"]
        detail = f"hidden {hidden_size}: {sync * 1e3:.1f} against {reload * 1e3:.1f} ms"
        bench.say("weight sync / vLLM's bare reload", sync / reload, 2.0, detail, at_most=True)

    whole = measure("step", bench.folder, 64)["seconds"]
    parts = plain + bare + measure("memory_copy", bench.folder, 64)["seconds"]
    detail = f"{whole:.2f} against {parts:.2f} s"
    bench.say("whole step on Ray / sum of bare parts", whole / parts, 1.25, detail, at_most=True)


def compare_supervised(bench: Bench, kind: str) -> None:
    """Tokens/s of a supervised trainer against TRL's on rows of log-normal lengths."""

    def of(side: str, *micro_batch: int) -> dict[str, float]:
        return measure(f"{side}_{kind}", bench.folder, *micro_batch, module="supervised")

    best = fastest(lambda size: of("trl", size)["seconds"], ROWS_A_STEP)
    rounds = [(of("ours"), of("trl", best)) for _ in range(bench.rounds)]
    tokens = rounds[0][0]["tokens"]
    ours, trl = (
        statistics.median(result["seconds"] for result in side)
        for side in zip(*rounds, strict=True)
    )
    detail = f"{tokens / ours:.0f} against {tokens / trl:.0f} tokens/s, {named(best, ROWS_A_STEP)}"
    bench.say(f"{kind.upper()} step: TRL / ours", trl / ours, 3.0, detail, at_most=False)


def compare_with_trl(bench: Bench, max_new_tokens: int, goal: float) -> None:
    """The whole step against TRL's, in one process and on Ray; the rounds take turns."""

    def of(name: str, *micro_batch: int) -> float:
        words = (max_new_tokens, HIDDEN_SIZE, *micro_batch)
        return measure(name, bench.folder, *words)["seconds"]

    best = fastest(lambda size: of("step_trl", size), COMPLETIONS_A_STEP)
    rounds = [(of("step_local"), of("step_trl", best), of("step")) for _ in range(bench.rounds)]
    local, trl, on_ray = (statistics.median(times) for times in zip(*rounds, strict=True))
    for what, ours in (("one process", local), ("Ray + vLLM", on_ray)):
        detail = f"{max_new_tokens} new tokens: {ours:.2f} against {trl:.2f} s a step, "
        detail += named(best, COMPLETIONS_A_STEP)
        bench.say(f"GRPO step: TRL / ours, {what}", trl / ours, goal, detail, at_most=False)


def main() -> None:
    """Parse, run in a temporary folder, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="alternating rounds of each pair")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--without-trl", action="store_true", help="leave TRL out")
    which.add_argument("--only-trl", action="store_true", help="nothing but the rows with TRL")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.rounds)
        if not options.only_trl:
            run(bench)
        if not options.without_trl:
            compare_all_with_trl(bench)
    print(f"{bench.missed} goal(s) missed" if bench.missed else "all goals met")


if __name__ == "__main__":
    main()
