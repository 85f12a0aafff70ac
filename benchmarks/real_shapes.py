"""SmolLM2-135M at real shapes: `python -m benchmarks.real_shapes`, after `make real-model`.

A GRPO step of 32 samples with prompts of 50 tokens against the sum of its bare parts, its update
against the arithmetic of its matrix products, and against TRL; steps of SFT and DPO against TRL.
Each measurement is a process of its own; run it on an idle machine. A ratio that misses its goal is
marked.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.run import Bench, measure

MODEL = Path(__file__).resolve().parents[1] / "models" / "smollm2-135m"
DTYPES = ("fp32", "bf16")
UPDATE_GOAL = {"fp32": 0.85}


class RealShapes(Bench):
    """Keeps what was found, by measurement, type and number of new tokens."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        super().__init__(folder, rounds=1)
        self.args = args

    def of(self, name: str, module: str = "measures", **fields: object) -> dict[str, float]:
        """Return what a measurement with the real model finds; print it."""
        known = {"real_model": self.args.model, "micro_batch_tokens": 2048}
        found = measure(name, self.folder, module, **known, **fields)
        said = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
        print(f"  {name} {fields}: {said}", flush=True)
        return found

    def compare_step(self, dtype: str, num_new: int) -> float:
        """Compare a GRPO step; return the seconds of its update."""
        prompt = {"least_prompt": 50, "most_prompt": 50, "num_prompts": self.args.prompts}
        fields = {"dtype": dtype, "max_new_tokens": num_new, "num_steps": 3, **prompt}
        what = f"{dtype}, {num_new} new tokens"
        update, limit = (self.of(name, **fields) for name in ("training", "limit"))
        ratio = limit["seconds"] / update["seconds"]
        detail = f"{limit['seconds']:.1f} of {update['seconds']:.1f} s, "
        detail += f"{limit['gflops']:.0f} GFLOP/s"
        goal = UPDATE_GOAL.get(dtype)
        self.say(f"update: limit / ours, {what}", ratio, goal, detail, at_most=False)
        parts = [self.of(name, **fields)["seconds"] for name in ("generate_plain", "memory_copy")]
        parts.append(update["bare"])
        steps = {name: self.of(name, **fields) for name in ("step_local_vllm", "step_local")}
        best = min(steps.values(), key=lambda step: step["seconds"])
        whole = steps["step_local_vllm"]["seconds"]
        detail = f"{whole:.1f} against {sum(parts):.1f} s"
        self.say(
            f"step with vLLM / bare parts, {what}", whole / sum(parts), 1.1, detail, at_most=True
        )
        if self.args.with_trl:
            sizes = self.args.trl_micro_batches
            trl = [self.of("step_trl", micro_batch=size, **fields) for size in sizes]
            self.compare_with_trl("GRPO step", what, best, trl, 2.0)
        return update["seconds"]

    def compare_with_trl(
        self, name: str, what: str, ours: dict[str, float], trl: list[dict[str, float]], goal: float
    ) -> None:
        """Say how a step compares with TRL's fastest, in seconds and in memory."""
        theirs = min(trl, key=lambda step: step["seconds"])
        detail = f"{ours['seconds']:.1f} against {theirs['seconds']:.1f} s"
        ratio = theirs["seconds"] / ours["seconds"]
        self.say(f"{name}: TRL / ours, {what}", ratio, goal, detail, at_most=False)
        detail = f"{ours['peak_gib']:.1f} against {theirs['peak_gib']:.1f} GiB"
        ratio = ours["peak_gib"] / theirs["peak_gib"]
        self.say(f"{name}: peak memory, ours / TRL's, {what}", ratio, 1.0, detail, at_most=True)

    def compare_supervised(self, kind: str, dtype: str, goal: float) -> None:
        """Compare a step of rows of log-normal lengths with TRL's."""
        fields = {"dtype": dtype, "num_rows": self.args.rows, "num_steps": 3}
        ours = self.of(f"ours_{kind}", "supervised", **fields)
        trl = [self.of(f"trl_{kind}", "supervised", micro_batch=m, **fields) for m in (2, 4)]
        what = f"{dtype}, {self.args.rows} rows"
        self.compare_with_trl(f"{kind.upper()} step", what, ours, trl, goal)


def main() -> None:
    """Print a row for each ratio, and what was measured for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(MODEL), help="folder of the model")
    parser.add_argument("--new-tokens", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--prompts", type=int, default=4, help="of a GRPO step, 8 samples each")
    parser.add_argument("--rows", type=int, default=16, help="of a step of SFT and DPO; 0: none")
    parser.add_argument("--trl-micro-batches", type=int, nargs="+", default=[8, 32], help="GRPO")
    parser.add_argument("--without-trl", dest="with_trl", action="store_false")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = RealShapes(Path(folder), args)
        for num_new in args.new_tokens:
            took = {dtype: bench.compare_step(dtype, num_new) for dtype in args.dtypes}
            if len(took) == len(DTYPES):
                what = f"update: fp32 / bf16, {num_new} new tokens"
                bench.say(what, took["fp32"] / took["bf16"], 1.6, "", at_most=False)
        if args.with_trl and args.rows:
            for dtype in args.dtypes:
                bench.compare_supervised("sft", dtype, 2.0)
                bench.compare_supervised("dpo", dtype, 2.5)
    print(f"{bench.missed} goal(s) missed" if bench.missed else "all goals met")


if __name__ == "__main__":
    main()
