"""Ranks that share rows compute what one rank computes: log-probs, entropy, values, router losses,
and the gradients of all of them (of every loss: tests/trainer/test_every_loss.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.config.common import DeepSpeedConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.models.actor import Actor, PackedModel
from openrlhf.models.loading import load_causal_lm, load_sequence_model
from openrlhf.models.value_head import CriticModel
from openrlhf.utils.packing import PackedBatch
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, make_reward_model

# Odd lengths; one token less than ranks; one long sequence; one that is all of the last slices.
ROWS = {"ragged": (7, 30, 2, 11), "short": (3,), "long": (61,), "even": (16, 16)}
SHARING = {
    "ring": DeepSpeedConfig(ring_attn_size=4),
    "ring by 2 heads": DeepSpeedConfig(ring_attn_size=4, ring_attn_head_stride=2),
    "ulysses": DeepSpeedConfig(ring_attn_size=4, cp_mode="ulysses"),
}
FAMILIES = {
    "qwen2": {"num_heads": 8, "num_kv_heads": 4},
    "mistral": {"num_heads": 8, "num_kv_heads": 4, "sliding_window": 5},
    "gemma2": {"num_heads": 4, "num_kv_heads": 4, "sliding_window": 6},  # soft caps
    "mixtral": {"num_heads": 4, "num_kv_heads": 4},
}


def batch_of(lengths: tuple[int, ...]) -> PackedBatch:
    """Rows whose first third has no targets."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = [torch.randint(6, 250, (n,), generator=generator) for n in lengths]
    return PackedBatch.from_sequences(tokens, [torch.arange(n) > n // 3 for n in lengths])


def weighted_sum(results: list[Tensor]) -> Tensor:
    """A loss in which every number counts differently."""
    return sum(
        (x.float() * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() for x in results
    )  # type: ignore[return-value]


def of_policy(model: Actor, batch: PackedBatch) -> list[Tensor]:
    stats = model(batch, temperature=0.8, with_entropy=True)
    return [x for x in stats if x is not None]


def of_critic(model: CriticModel, batch: PackedBatch) -> list[Tensor]:
    return [model(batch)]


class Case(NamedTuple):
    """A model and what is asked of it."""

    load: Callable[[Path], PackedModel]
    ask: Callable[..., list[Tensor]]


def policy(family: str) -> Case:
    with_aux_loss = family == "mixtral"
    return Case(
        lambda folder: Actor(load_causal_lm(folder / family), with_aux_loss=with_aux_loss),
        of_policy,
    )


CASES = {
    **{family: policy(family) for family in FAMILIES},
    "critic": Case(lambda f: CriticModel(load_sequence_model(f / "reward")), of_critic),
}
Outcome = tuple[list[Tensor], Tensor]


def outcome(model: PackedModel, ask: Callable, batch: PackedBatch) -> Outcome:
    """Results and the flat gradient of their weighted sum."""
    model.zero_grad(set_to_none=False)
    results = ask(model, batch)
    weighted_sum(results).backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    return [x.detach() for x in results], torch.cat([grad.flatten() for grad in grads])


def compare_all(folder: Path) -> dict[tuple[str, str, str], tuple[Outcome, Outcome]]:
    """Every case alone and shared."""
    found = {}
    strategies = {}
    for sharing, ds in SHARING.items():
        strategies[sharing] = DeepSpeedStrategy(ds)
        strategies[sharing].setup()
    for name, case in CASES.items():
        model = case.load(folder)
        for row in ROWS if name == "qwen2" else ("ragged",):
            batch = batch_of(ROWS[row])
            model.context = None
            alone = outcome(model, case.ask, batch)
            # The ways to share are the policy's matter; other models see one of them.
            ways = strategies if name == "qwen2" else ("ring by 2 heads", "ulysses")
            for sharing in ways:
                strategy = strategies[sharing]
                model.context = strategy.context
                results, gradient = outcome(model, case.ask, batch)
                dist.all_reduce(gradient, group=strategy.context.group)
                found[name, row, sharing] = (alone, (results, gradient))
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("shared")
    for family, options in FAMILIES.items():
        make_model(folder / family, family, initializer_range=0.1, **options)  # type: ignore[arg-type]
    heads = FAMILIES["qwen2"]
    make_reward_model(folder / "reward", initializer_range=0.1, **heads)
    return run_ranks(compare_all, 4, folder)  # type: ignore[return-value]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", CASES)
def test_a_shared_row_is_the_row_of_one_rank(ranks: list[dict], case: str) -> None:
    for rank, found in enumerate(ranks):
        for (name, row, sharing), ((expected, gradient), (actual, shared)) in found.items():
            if name != case:
                continue
            where = f"rank {rank}, {row}, {sharing}"
            assert len(actual) == len(expected)
            for x, y in zip(actual, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, msg=lambda m, w=where: w + m)
            error = (shared - gradient).norm() / gradient.norm()
            assert error < 1e-5, f"{where}: gradient {error:.1e}"
