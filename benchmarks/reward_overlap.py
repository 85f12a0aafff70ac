"""What a slow reward adds to a step on Ray and vLLM: one run, in which steps with and without the
delay take turns.

The policy is a chain: each of its tokens is followed by the next one, so how long an answer is
depends on the prompt's last letter alone. Both kinds of steps thus do the same work, whose lengths
spread as those of answers do, and what differs between them is the reward. A step is 128 samples:
generation, reward, update, weight sync. Leave the machine idle meanwhile.

    python -m benchmarks.reward_overlap [--path sync|stream|async]
"""

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_PROMPTS, NUM_SAMPLES = 32, 4  # of a step
MEAN_TOKENS, MAX_NEW_TOKENS = 120, 512
VOCAB_SIZE, FIRST_LINK = 2048, 300  # the chain is the ids from there on, then the end
SHARPNESS = 25.0  # the logit of a token's successor; all others are about 0
GOAL = 1.05
ENVIRONMENT = {
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "10000",
    "HF_HUB_OFFLINE": "1",
    "RAY_ADDRESS": "local",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Rewards differ within a prompt: else there would be nothing to update.
REWARD = """
import os, random, time

def reward_func(queries, prompts, labels):
    file = os.open({seen!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b"x" * len(queries))
    step = (os.fstat(file).st_size - 1) // {num_samples}
    os.close(file)
    if step // {block} % 2:
        time.sleep({seconds} * len(queries))
    return [random.random() for _ in queries]
"""


@dataclass(frozen=True)
class Way:
    """How samples reach the trainer, and which steps are compared."""

    flags: str
    block: int  # steps of a kind in a row
    num_settling: int  # the first of them, which are left out
    num_rounds: int  # pairs of blocks that are compared; a pair before them warms up
    hidden_size: int


PATHS = {
    "sync": Way("", 1, 0, 4, 512),
    "stream": Way("--dynamic_filtering", 1, 0, 4, 512),
    # Samples are generated a step ahead.
    "async": Way("--async_train", 4, 2, 2, 256),
}


def length_of(row: int) -> int:
    """Tokens of the answers to a prompt: quantiles of an exponential distribution."""
    quantile = -MEAN_TOKENS * math.log(1 - (row + 0.5) / NUM_PROMPTS)
    return min(max(round(quantile), 1), MAX_NEW_TOKENS)


def make_inputs(folder: Path, hidden_size: int) -> None:
    """The policy and its prompts."""
    from tests.tiny import make_model, write_jsonl

    path = make_model(
        folder / "model",
        hidden_size=hidden_size,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=VOCAB_SIZE,
    )
    texts = ["q" * 15 + chr(ord("A") + row) for row in range(NUM_PROMPTS)]
    make_chain(path, texts)
    write_jsonl(folder / "prompts.jsonl", [{"input": text} for text in texts])


def make_chain(path: Path, texts: Sequence[str]) -> None:
    """Make every token's successor certain; layers are computed and add nothing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = torch.arange(FIRST_LINK, VOCAB_SIZE)
    successors = torch.cat([ids[1:], torch.tensor([tokenizer.eos_token_id])])
    last_letters = torch.tensor([tokenizer.encode(text)[-1] for text in texts])
    starts = torch.tensor([VOCAB_SIZE + 1 - length_of(row) for row in range(len(texts))])
    starts[starts == VOCAB_SIZE] = tokenizer.eos_token_id
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        states = model.model.norm(embedding)  # (V, H), of norm sqrt(H)
        steps = SHARPNESS * states / embedding.size(1)
        head.zero_()
        head.index_add_(0, successors, steps[ids])
        head.index_add_(0, starts, steps[last_letters])
    model.save_pretrained(path)


def words(folder: Path, path: Way, num_steps: int) -> list[str]:
    """The command line."""
    samples = NUM_PROMPTS * NUM_SAMPLES
    flags = (
        f"--pretrain {folder / 'model'} --prompt_data {folder / 'prompts.jsonl'} "
        f"--input_key input --remote_rm_url {folder / 'reward.py'} --num_episodes {num_steps} "
        f"--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt {NUM_SAMPLES} "
        f"--rollout_batch_size {NUM_PROMPTS} --micro_rollout_batch_size {NUM_SAMPLES} "
        f"--train_batch_size {samples} --use_dynamic_batch --train_max_tokens_per_gpu 2048 "
        f"--prompt_max_len 32 --generate_max_len {MAX_NEW_TOKENS} --actor_learning_rate 1e-8 "
        f"--vllm_num_engines 1 --save_path {folder / 'run'} {path.flags}"
    )
    return flags.split()


def run(folder: Path, path: Way, num_steps: int) -> list[dict[str, float]]:
    """The records of all steps."""
    from openrlhf.cli import train_ppo_ray
    from openrlhf.utils.tracker import read_metrics

    train_ppo_ray.main(words(folder, path, num_steps))
    steps = [r for r in read_metrics(folder / "run" / "metrics.jsonl") if "reward" in r]
    mean = statistics.mean(length_of(row) for row in range(NUM_PROMPTS))
    # An asynchronous step may have prompts of two episodes; over the run all come equally often.
    found = statistics.mean(step["response_length"] for step in steps)
    assert abs(found - mean) < 1, "the policy left its chain"
    return steps


def sides(
    steps: Sequence[dict[str, float]], path: Way
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Steps without and with the delay; those that warm up are left out."""
    found: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    for index, step in enumerate(steps):
        block, position = divmod(index, path.block)
        if block >= 2 and position >= path.num_settling:
            found[block % 2].append(step)
    return found


def shown(steps: Sequence[dict[str, float]], name: str) -> str:
    """Median and range of a time."""
    times = [step.get(name, 0.0) for step in steps]
    return f"{statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f})"


def main() -> None:
    """Run, and say the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", choices=PATHS, default="sync")
    parser.add_argument("--reward-ms", type=float, default=50)
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    path = PATHS[args.path]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, path.hidden_size)
        code = REWARD.format(
            seen=str(folder / "seen"),
            num_samples=NUM_PROMPTS * NUM_SAMPLES,
            block=path.block,
            seconds=args.reward_ms / 1000,
        )
        (folder / "reward.py").write_text(code)
        steps = run(folder, path, 2 * path.block * (path.num_rounds + 1))
    without, slow = sides(steps, path)
    for name in ("timing/generation", "timing/reward", "timing/wait", "timing/step_total"):
        if any(name in step for step in steps):
            print(f"{name:<20}{shown(without, name)} without, {shown(slow, name)} with")
    medians = [statistics.median(s["timing/step_total"] for s in side) for side in (without, slow)]
    ratio = medians[1] / medians[0]
    mark = "ok" if ratio <= GOAL else "MISSED"
    what = f"{args.path} step with a reward of {args.reward_ms:g} ms a sample / without"
    print(f"{what}: {ratio:.3f}  goal <= {GOAL}  {mark}")


if __name__ == "__main__":
    main()
