"""All ratios on this machine, side by side: `python -m benchmarks.run [--rounds 2] [--without-trl]
[--only-trl]`.

Leave the machine idle meanwhile. Goals are those the project has set itself; a ratio that misses
its goal is marked.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.workload import Workload

TRL_MICRO_BATCHES = (4, 8, 16)  # and the whole batch
SUPERVISED = ("sft", "dpo", "rm")
ROWS_A_STEP, COMPLETIONS_A_STEP = 64, 128  # of benchmarks.workload
# Both sides of every ratio get the same.
THREADS = {
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "10000",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}


def measure(
    name: str, folder: Path, module: str = "measures", **fields: object
) -> dict[str, float]:
    """Run one measurement in a process of its own; the fields are those of a Workload."""
    words = [sys.executable, "-m", f"benchmarks.{module}", name, str(folder)]
    words += [f"{field}={value}" for field, value in fields.items()]
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

    def both(self, ours: str, theirs: str, **fields: object) -> tuple[float, float]:
        """Median seconds of two measurements, taken in turns."""
        pairs = [
            (
                measure(ours, self.folder, **fields)["seconds"],
                measure(theirs, self.folder, **fields)["seconds"],
            )
            for _ in range(self.rounds)
        ]
        first, second = zip(*pairs, strict=True)
        return statistics.median(first), statistics.median(second)

    def say(
        self, what: str, ratio: float, goal: float | None, detail: str, *, at_most: bool
    ) -> None:
        """Print one ratio against its goal, where it has one."""
        mark = ""
        if goal is not None:
            is_met = ratio <= goal if at_most else ratio >= goal
            self.missed += not is_met
            sign = "<=" if at_most else ">="
            mark = f"goal {sign} {goal:<5} {'ok' if is_met else 'MISSED'}"
        print(f"{what:<56}{ratio:>7.2f}  {mark:<20} {detail}", flush=True)


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
    for kind in SUPERVISED:
        compare_supervised(bench, kind)
    for max_new_tokens in (64, 256):
        compare_with_trl(bench, max_new_tokens)


def run(bench: Bench) -> None:
    """All benchmarks without TRL."""
    compare_memory(bench)
    own = measure("generate_hf", bench.folder)["seconds"]
    print(
        f"{'generation: the policy itself (no vLLM), 64 tokens':<52} {128 * 64 / own:.0f} tokens/s"
    )
    for max_new_tokens in (64, 256):
        compare_with_parts(bench, max_new_tokens)
    for kind in SUPERVISED:
        compare_with_limit(bench, kind)
    sync, reload = bench.both("weight_sync", "vllm_reload", hidden_size=2048)
    detail = f"638 MB: {sync * 1e3:.0f} against {reload * 1e3:.0f} ms"
    bench.say("weight sync / vLLM's bare reload", sync / reload, 1.5, detail, at_most=True)


def compare_with_parts(bench: Bench, max_new_tokens: int) -> None:
    """Generation, training and the whole step on Ray against vLLM and torch by themselves."""
    work = Workload(bench.folder, max_new_tokens=max_new_tokens)
    generated = work.num_completions * max_new_tokens
    trained_on = sum(rows.numel() for rows in work.groups_to_train_on())
    fields = {"max_new_tokens": max_new_tokens}
    engine, plain = bench.both("generate_vllm", "generate_plain", **fields)
    detail = f"{generated / engine:.0f} against {generated / plain:.0f} tokens/s"
    what = f"generation: our vLLM engine / vllm.LLM, {max_new_tokens} tokens"
    bench.say(what, plain / engine, 0.95, detail, at_most=False)

    rounds = [measure("training", bench.folder, **fields) for _ in range(bench.rounds)]
    update, bare = (statistics.median(r[side] for r in rounds) for side in ("seconds", "bare"))
    detail = f"{trained_on / update:.0f} against {trained_on / bare:.0f} tokens/s"
    what = f"training: our update / bare loop, {max_new_tokens} tokens"
    bench.say(what, bare / update, 0.95, detail, at_most=False)

    limit = measure("limit", bench.folder, **fields)["seconds"]
    detail = f"{limit:.2f} of {update:.2f} s"
    what = f"training: limit / our update, {max_new_tokens} tokens"
    bench.say(what, limit / update, 0.9, detail, at_most=False)

    copy = measure("memory_copy", bench.folder, **fields)["seconds"]
    steps = [measure("step", bench.folder, **fields)["seconds"] for _ in range(bench.rounds)]
    whole, parts = statistics.median(steps), plain + bare + copy
    detail = f"{whole:.2f} against {parts:.2f} s"
    what = f"whole step on Ray / its bare parts, {max_new_tokens} tokens"
    bench.say(what, whole / parts, 1.2, detail, at_most=True)


def compare_with_limit(bench: Bench, kind: str) -> None:
    """A supervised step against its matrix products and attention by themselves."""
    ours, limit = bench.both(f"ours_{kind}", f"limit_{kind}", module="supervised")
    detail = f"{limit:.2f} of {ours:.2f} s"
    bench.say(f"{kind.upper()} step: limit / ours", limit / ours, 0.9, detail, at_most=False)


def compare_supervised(bench: Bench, kind: str) -> None:
    """Tokens/s of a supervised trainer against TRL's on rows of log-normal lengths."""

    def of(side: str, micro_batch: int = 0) -> dict[str, float]:
        words = {"module": "supervised", "micro_batch": micro_batch}
        return measure(f"{side}_{kind}", bench.folder, **words)

    best = fastest(lambda size: of("trl", size)["seconds"], ROWS_A_STEP)
    rounds = [(of("ours"), of("trl", best)) for _ in range(bench.rounds)]
    tokens = rounds[0][0]["tokens"]
    ours, trl = (
        statistics.median(result["seconds"] for result in side)
        for side in zip(*rounds, strict=True)
    )
    detail = f"{tokens / ours:.0f} against {tokens / trl:.0f} tokens/s, {named(best, ROWS_A_STEP)}"
    bench.say(f"{kind.upper()} step: TRL / ours", trl / ours, None, detail, at_most=False)


def compare_with_trl(bench: Bench, max_new_tokens: int) -> None:
    """The whole step against TRL's, in one process and on Ray; the rounds take turns."""

    def of(name: str, micro_batch: int = 0) -> float:
        fields = {"max_new_tokens": max_new_tokens, "micro_batch": micro_batch}
        return measure(name, bench.folder, **fields)["seconds"]

    best = fastest(lambda size: of("step_trl", size), COMPLETIONS_A_STEP)
    rounds = [(of("step_local"), of("step_trl", best), of("step")) for _ in range(bench.rounds)]
    local, trl, on_ray = (statistics.median(times) for times in zip(*rounds, strict=True))
    one_process = 1.9 if max_new_tokens == 256 else None  # with 64, arithmetic forbids it
    for what, ours, goal in (("one process", local, one_process), ("Ray + vLLM", on_ray, 1.6)):
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
