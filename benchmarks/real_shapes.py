"""The update of SmolLM2-135M against the arithmetic of its matrix products, in fp32 and bf16:
`python -m benchmarks.real_shapes [--new-tokens 64 256] [--samples 32]`, after `make real-model`.

The limit of an update is the time of its matrix products and of attention alone, forward and
backward, at the sizes of its micro-batches, measured in the same process with the same threads.
Each measurement is a process of its own; run it on an idle machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import measures

MODEL = Path(__file__).resolve().parents[1] / "models" / "smollm2-135m"
NUM_PROMPT, NUM_SAMPLES = 50, 8  # tokens of a prompt, samples of one
MAX_TOKENS = 2048  # of a micro-batch
seconds = partial(measures.seconds, repeats=3, warm_up=1)


def update_s(dtype: str, num_new: int, num_samples: int, folder: Path) -> float:
    """Return the seconds of a policy update: packed rows, PPO loss, DeepSpeed, AdamW."""
    from openrlhf.config.ppo import PPOConfig
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.update_plan import plan_updates, update_shares
    from openrlhf.trainer.workers.policy import PolicyModelActor
    from openrlhf.utils.rollout import Rollout, sequence_tensors

    config = PPOConfig.model_validate(
        {
            "actor": {"model_name_or_path": str(MODEL)},
            "rollout": {"max_new_tokens": num_new},
            "train": {"dynamic_batch_enable": True, "max_tokens_per_gpu": MAX_TOKENS},
            "ds": {"param_dtype": dtype},
        }
    )
    actor = PolicyModelActor(config, "actor", str(folder))
    actor.setup()
    actor.init_model(1000)
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for k in range(num_samples):
        row = torch.randint(10, 49_000, (NUM_PROMPT + num_new,), generator=generator).tolist()
        token_ids, mask = sequence_tensors(row[:NUM_PROMPT], row[NUM_PROMPT:])
        rollouts.append(
            Rollout(
                sample_id=str(k),
                group_id=k // NUM_SAMPLES,
                row_id=k // NUM_SAMPLES,
                token_ids=token_ids,
                action_mask=mask,
                logprobs=torch.full((num_new,), -10.8),
                weight_versions=torch.zeros(num_new, dtype=torch.int32),
                finish_reason="length",
                prompt_text="",
                response_text="",
                reward=0.0,
            )
        )
    experience = Experience.from_rollouts(rollouts).laid_out()
    noise = torch.randn(num_samples * num_new, generator=generator)
    experience = replace(experience, advantages=noise)
    plan = plan_updates(experience, 1, train_batch_size=num_samples, max_epochs=1, seed=0)
    [steps] = update_shares(experience, plan)
    return seconds(partial(actor.fit, steps))


def limit_s(dtype: str, num_new: int, num_samples: int) -> tuple[float, float]:
    """Return the seconds of an update's matrix products and attention by themselves, and the rate
    of the products in GFLOP/s.
    """
    shape = json.loads((MODEL / "config.json").read_text())
    hidden, inner, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    length = NUM_PROMPT + num_new
    in_micro_batch = min(MAX_TOKENS // length, num_samples)
    num_micro_batches = -(-num_samples // in_micro_batch)
    tokens, actions = in_micro_batch * length, in_micro_batch * num_new
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    qkv = (heads + 2 * kv_heads) * size
    of_layer = [(hidden, qkv), (heads * size, hidden), (hidden, 2 * inner), (inner, hidden)]
    rows = [(tokens, *each, shape["num_hidden_layers"]) for each in of_layer]
    rows.append((actions, hidden, shape["vocab_size"], 1))
    total = flops = 0.0
    for num_rows, num_in, num_out, count in rows:
        x, w = torch.randn(num_rows, num_in, dtype=kind), torch.randn(num_out, num_in, dtype=kind)
        grad = torch.randn(num_rows, num_out, dtype=kind)
        products = (lambda: x @ w.T, lambda: grad @ w, lambda: grad.T @ x)  # noqa: B023
        total += count * sum(map(seconds, products))
        flops += count * 6 * num_rows * num_in * num_out
    products_s = total * num_micro_batches

    q = torch.randn(in_micro_batch, heads, length, size, dtype=kind, requires_grad=True)
    k, v = (torch.randn_like(q, requires_grad=True) for _ in range(2))

    def attention() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    attention_s = seconds(attention) * shape["num_hidden_layers"] * num_micro_batches
    return products_s + attention_s, flops * num_micro_batches / products_s / 1e9


def main() -> None:
    """Print a row for each dtype and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--one", choices=["fp32", "bf16"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        [num_new] = args.new_tokens
        with tempfile.TemporaryDirectory() as folder:
            update = update_s(args.one, num_new, args.samples, Path(folder))
        limit, rate = limit_s(args.one, num_new, args.samples)
        print("RESULT " + json.dumps({"update": update, "limit": limit, "gflops": rate}))
        return
    from benchmarks.run import THREADS

    for num_new in args.new_tokens:
        updates = {}
        for dtype in ("fp32", "bf16"):
            words = ["--one", dtype, "--new-tokens", str(num_new), "--samples", str(args.samples)]
            run = [sys.executable, "-m", "benchmarks.real_shapes", *words]
            env = os.environ | THREADS
            said = subprocess.run(run, capture_output=True, text=True, check=True, env=env).stdout
            found = json.loads(said.rpartition("RESULT ")[2])
            updates[dtype] = found["update"]
            print(
                f"{dtype} {num_new} new tokens: update {found['update']:.2f} s, limit "
                f"{found['limit']:.2f} s, ratio {found['limit'] / found['update']:.2f}, "
                f"{found['gflops']:.0f} GFLOP/s",
                flush=True,
            )
        print(f"bf16 is {updates['fp32'] / updates['bf16']:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()
