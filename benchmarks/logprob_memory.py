"""Peak memory and time of `chunked_logprobs` on the CPU, next to plain linear + log_softmax.

Every variant runs in a process of its own. The kernel's high-water mark (VmHWM) is reset just
before the forward and again before the backward; its rise over the memory resident at that moment,
less the gradient of the weight, is what the call took: temporaries, per-token vectors, the gradient
of the hidden states, and whatever the matrix library keeps for itself.

    python benchmarks/logprob_memory.py --vocab-size 152000 --num-tokens 4096
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf.algorithms.tokens import chunked_logprobs

MIB = 2**20


def status_kib(field: str) -> int:
    """VmRSS (now) or VmHWM (highest since the last reset) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"{field} is not in /proc/self/status; this benchmark needs Linux")


class Stretch:
    """Peak resident memory above the start, and seconds, of a `with` block."""

    def __enter__(self) -> "Stretch":
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
        self._start_kib = status_kib("VmRSS")
        self._start_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start_s
        self.extra_mib = (status_kib("VmHWM") - self._start_kib) / 1024


def dense_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """The plain way, for comparison: all logits at once."""
    logits = F.linear(hidden, weight).float()
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else None
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Run one variant once, forward and backward, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(args.num_threads)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.num_tokens, args.hidden_size, dtype=dtype, requires_grad=True)
    weight = torch.randn(args.vocab_size, args.hidden_size, dtype=dtype, requires_grad=True)
    targets = torch.randint(args.vocab_size, (args.num_tokens,))

    def run(num_tokens: int) -> tuple[Tensor, ...]:
        some = (hidden[:num_tokens], weight, targets[:num_tokens])
        if args.variant == "dense":
            outputs = dense_logprobs(*some, with_entropy=args.with_entropy)
        else:
            outputs = chunked_logprobs(*some, with_entropy=args.with_entropy)
        return tuple(x for x in outputs if x is not None)

    sum(x.sum() for x in run(2)).backward()  # loads what is loaded on first use
    with Stretch() as forward:
        outputs = run(args.num_tokens)
    weight.grad = None
    with Stretch() as backward:
        sum(x.sum() for x in outputs).backward()
    grad_weight_mib = weight.numel() * weight.element_size() / MIB
    return {
        "forward_mib": forward.extra_mib,
        "backward_mib": backward.extra_mib - grad_weight_mib,
        "forward_s": forward.seconds,
        "backward_s": backward.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=152_000)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--with-entropy", action="store_true")
    parser.add_argument("--with-dense", action="store_true", help="also measure the plain way")
    parser.add_argument(
        "--variant", choices=("chunked", "dense"), help="one, in this process, as JSON"
    )
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args)))
        return
    print(f"1,024 x {args.vocab_size:,} x 4 bytes = {1024 * args.vocab_size * 4 / MIB:,.0f} MiB")
    for variant in ("chunked", "dense") if args.with_dense else ("chunked",):
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        print(
            f"{variant:8s} forward {found['forward_mib']:8,.0f} MiB {found['forward_s']:6.2f} s   "
            f"backward {found['backward_mib']:8,.0f} MiB {found['backward_s']:6.2f} s"
        )


if __name__ == "__main__":
    main()
