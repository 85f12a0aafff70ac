"""Models whose layers are whole or split over ranks: a few steps, and what they leave."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.collectives import all_or_none
from openrlhf.distributed.export import export_hf
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import stored_parameters
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm, load_sequence_model
from openrlhf.models.value_head import CriticModel
from tests.models.helpers import full_batch, random_sequences

# An epsilon above what rounding makes of a gradient of zero: Adam would take it for a direction.
OPTIM = OptimizerConfig(
    adam=AdamConfig(lr=1e-3, weight_decay=0.1, eps=1e-5), max_norm=0.5, lr_scheduler="constant"
)
SEQUENCES = random_sequences((7, 30, 2, 11, 5, 9, 13, 4))


def load(folder: Path, name: str) -> nn.Module:
    if name == "critic":
        return CriticModel(load_sequence_model(folder / "reward"))
    return Actor(load_causal_lm(folder / name))


def loss_of(engine: object, name: str, part: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The part of these sequences in the loss of all, and the numbers it is made of."""
    batch = full_batch(part).to(engine.device)  # type: ignore[attr-defined]
    values = engine(batch) if name == "critic" else engine(batch, temperature=0.7).logprobs
    return values.float().square().sum() / 80, values.detach()


def train(folder: Path, name: str, options: dict) -> dict:
    """Three steps of a model, and what it says after them."""
    strategy = DeepSpeedStrategy(DeepSpeedConfig(**options), seed=1)
    strategy.setup()
    frozen = strategy.prepare_eval(load(folder, name))
    model = load(folder, name)
    engine = strategy.prepare_train(model, OPTIM, num_updates=4)
    norms = []
    for _ in range(3):
        own = strategy.topology.shard(SEQUENCES)
        engine.backward(loss_of(engine, name, own)[0], is_last_micro_batch=True)
        norms.append(engine.step())
    with torch.no_grad():
        said = loss_of(engine, name, SEQUENCES)[1]
    where = "-".join(map(str, (strategy.topology.world_size, name, *options.values())))
    tokenizer = AutoTokenizer.from_pretrained(folder / ("reward" if name == "critic" else name))
    export_hf(model.model, tokenizer, folder / where)
    weights = {n: t.clone() for n, t in stored_parameters(engine.module)}
    all_or_none(engine.take_states(folder / f"{where}-states"))
    engine.backward(loss_of(engine, name, SEQUENCES[:1])[0], is_last_micro_batch=True)
    engine.step()
    engine.load_states(folder / f"{where}-states")
    assert all(torch.equal(t, weights[n]) for n, t in stored_parameters(engine.module))
    return {
        "norms": norms,
        "said": said,
        "frozen": loss_of(frozen, name, SEQUENCES)[1],
        "weights": weights,
        "has_split_head": getattr(getattr(model, "head", None), "shard", None) is not None,
        "numel": sum(p.numel() for p in engine.module.parameters()),
        "export": folder / where,
        "stage": engine.zero_stage,
    }
