"""Steps per second with --async_train against without: long-tailed lengths, generation and training
of equal cost, engine and trainer on a core each in both runs.

Lengths are geometric, as a random model with few tokens ends its answers: a mean of about 50
tokens, a longest of over 200. With a batch's longest answer generation is paid for, with its tokens
training: the batch size at which both cost the same is found in a first run. Leave the machine idle
meanwhile.

    python -m benchmarks.async_training [--async-queue-size 1] [--partial-rollout]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

ENGINE_CORE, TRAINER_CORE = {0}, {1}
NUM_SAMPLES, NUM_STEPS = 8, 14
FIRST_BATCH = 8  # prompts of a step, in the run that finds the batch size
MAX_NEW_TOKENS = 320
WARM_UP, COOL_DOWN = 3, 2  # steps left out: compiling; nothing is generated beside the last ones
GOAL = 1.6
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
REWARD_CODE = """
def reward_func(queries, prompts, labels):
    return {"rewards": [float(sum(map(ord, query)) % 7) for query in queries]}
"""


def make_inputs(folder: Path) -> None:
    """A random model with 44 tokens, prompts, a reward."""
    import transformers

    from examples.python.make_demo import make_tokenizer
    from tests.tiny import make_model, write_jsonl

    tokenizer = make_tokenizer()
    model = make_model(
        folder / "model",
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(model)
    generation = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    generation.save_pretrained(model)
    rows = [{"input": f"{k}+{k}=?"} for k in range(64 * NUM_STEPS)]
    write_jsonl(folder / "prompts.jsonl", rows)
    (folder / "reward.py").write_text(REWARD_CODE)


def pin_actors(is_done: threading.Event) -> None:
    """Keep every thread of the engine on one core and of the trainer on the other."""
    while not is_done.wait(0.2):
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                name = (process / "cmdline").read_bytes()
                is_engine = name.startswith(b"ray::LLMRayActor")
                if is_engine or name.startswith(b"ray::PolicyModelActor"):
                    for thread in (process / "task").iterdir():
                        cores = ENGINE_CORE if is_engine else TRAINER_CORE
                        os.sched_setaffinity(int(thread.name), cores)


def run_command(folder: Path, num_prompts: int, flags: list[str]) -> None:
    """Train in this process with so many prompts a step, and print what a step took."""
    import ray

    from openrlhf.cli import train_ppo_ray
    from openrlhf.utils.tracker import read_metrics

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    is_done = threading.Event()
    threading.Thread(target=pin_actors, args=(is_done,), daemon=True).start()
    samples = str(num_prompts * NUM_SAMPLES)
    words = (
        f"--pretrain {folder / 'model'} --prompt_data {folder / 'prompts.jsonl'} "
        f"--max_samples {num_prompts * NUM_STEPS} "
        f"--remote_rm_url {folder / 'reward.py'} --input_key input "
        f"--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt {NUM_SAMPLES} "
        f"--rollout_batch_size {num_prompts} --micro_rollout_batch_size {NUM_SAMPLES} "
        f"--train_batch_size {samples} --micro_train_batch_size {samples} --use_dynamic_batch "
        f"--train_max_tokens_per_gpu 2048 --prompt_max_len 64 --vllm_num_engines 1 "
        f"--generate_max_len {MAX_NEW_TOKENS} --actor_learning_rate 1e-6 "
        f"--save_path {folder / 'run'}"
    )
    train_ppo_ray.main([*words.split(), *flags])
    is_done.set()
    steps = [r for r in read_metrics(folder / "run" / "metrics.jsonl") if "reward" in r]
    steps = steps[WARM_UP : len(steps) - COOL_DOWN]
    names = ["response_length", *(name for name in steps[0] if name.startswith("timing/"))]
    found = {name: statistics.mean(step.get(name, 0.0) for step in steps) for name in names}
    found["staleness_max"] = max(step.get("staleness_max", 0.0) for step in steps)
    print("RESULT " + json.dumps(found))


def measure(folder: Path, num_prompts: int, *flags: str) -> dict[str, float]:
    """Means over the steps of a run in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.async_training", "--folder", str(folder)]
    words += ["--run", " ".join((str(num_prompts), *flags))]
    environment = os.environ | ENVIRONMENT
    result = subprocess.run(words, capture_output=True, text=True, env=environment)
    for line in result.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"{flags} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")


def training_s(found: dict[str, float]) -> float:
    """What the trainer computes in a step."""
    return found["timing/make_experience"] + found["timing/ppo_train"]


def batch_of_equal_cost(folder: Path) -> int:
    """Prompts of a step with which training takes as long as generation."""
    found = measure(folder, FIRST_BATCH)
    return max(round(FIRST_BATCH * found["timing/generation"] / training_s(found)), 2)


def compare(folder: Path, asynchronous: list[str], rounds: int) -> None:
    """Measure both in turns, and print the ratio."""
    make_inputs(folder)
    size = batch_of_equal_cost(folder)
    both = []
    for _ in range(rounds):
        one = measure(folder, size)
        other = measure(folder, size, "--async_train", *asynchronous)
        both.append((one, other))
        print(
            f"{size} x {NUM_SAMPLES} responses of {one['response_length']:.0f} tokens | sync: step "
            f"{one['timing/step_total']:.2f} s, generation {one['timing/generation']:.2f} s, "
            f"training {training_s(one):.2f} s | async: step {other['timing/step_total']:.2f} s, "
            f"training {training_s(other):.2f} s, waiting {other['timing/wait']:.2f} s, drain "
            f"{other['timing/drain']:.2f} s, at most {other['staleness_max']:.0f} update(s) behind",
            flush=True,
        )
    ratio = statistics.median(
        one["timing/step_total"] / other["timing/step_total"] for one, other in both
    )
    mark = "ok" if ratio >= GOAL else "MISSED"
    print(f"steps per second, async against sync: {ratio:.2f}  goal >= {GOAL}  {mark}")


def main() -> None:
    """Compare, or be one of the runs that are compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--async-queue-size", default="1")
    parser.add_argument("--partial-rollout", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        num_prompts, *flags = arguments.run.split()
        run_command(arguments.folder, int(num_prompts), flags)
        return
    flags = ["--async_queue_size", arguments.async_queue_size]
    flags += ["--partial_rollout"] if arguments.partial_rollout else []
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), flags, arguments.rounds)


if __name__ == "__main__":
    main()
