"""Ranks that share rows compute what one rank computes: log-probs, entropy, values, router losses,
and the gradients of all of them (of every loss: tests/trainer/test_every_loss.py).
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from openrlhf.config.common import DeepSpeedConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm, load_sequence_model
from openrlhf.models.value_head import CriticModel
from tests.distributed.spawn import run_ranks
from tests.helpers.shared_rows import ROWS, Outcome, batch_of, outcome
from tests.tiny import make_model, make_reward_model

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


def load(folder: Path, name: str) -> Actor | CriticModel:
    if name == "critic":
        return CriticModel(load_sequence_model(folder / "reward"))
    return Actor(load_causal_lm(folder / name), with_aux_loss=name == "mixtral")


def compare_all(folder: Path) -> dict[tuple[str, str, str], tuple[Outcome, Outcome]]:
    """Every model alone and shared."""
    found = {}
    strategies = {sharing: DeepSpeedStrategy(ds) for sharing, ds in SHARING.items()}
    for strategy in strategies.values():
        strategy.setup()
    for name in (*FAMILIES, "critic"):
        model = load(folder, name)
        for row in ROWS if name == "qwen2" else ("ragged",):
            batch = batch_of(ROWS[row])
            model.context = None
            alone = outcome(model, batch)
            for sharing in strategies if name == "qwen2" else ("ring by 2 heads", "ulysses"):
                model.context = strategies[sharing].context
                results, gradient = outcome(model, batch)
                dist.all_reduce(gradient, group=model.context.group)
                found[name, row, sharing] = (alone, (results, gradient))
    dist.barrier()
    return found


@pytest.mark.timeout(240)
def test_a_shared_row_is_the_row_of_one_rank(tmp_path: Path) -> None:
    for family, options in FAMILIES.items():
        make_model(tmp_path / family, family, initializer_range=0.1, **options)  # type: ignore[arg-type]
    make_reward_model(tmp_path / "reward", initializer_range=0.1, **FAMILIES["qwen2"])
    for rank, found in enumerate(run_ranks(compare_all, 4, tmp_path)):
        for case, ((expected, gradient), (actual, shared)) in found.items():  # type: ignore[attr-defined]
            where = f"rank {rank}, {case}"
            assert len(actual) == len(expected)
            for x, y in zip(actual, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, msg=lambda m, w=where: w + m)
            error = (shared - gradient).norm() / gradient.norm()
            assert error < 1e-5, f"{where}: gradient {error:.1e}"
