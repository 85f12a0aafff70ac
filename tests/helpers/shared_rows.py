"""Rows of tokens, and what a model says of them alone and shared by ranks."""

import torch
from torch import Tensor

from openrlhf.models.actor import Actor
from openrlhf.models.value_head import CriticModel
from openrlhf.utils.packing import PackedBatch

# Odd lengths; one token less than ranks; one long sequence; one that is all of the last slices.
ROWS = {"ragged": (7, 30, 2, 11), "short": (3,), "long": (61,), "even": (16, 16)}


def batch_of(lengths: tuple[int, ...]) -> PackedBatch:
    """Rows whose first third has no targets."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = [torch.randint(6, 250, (n,), generator=generator) for n in lengths]
    return PackedBatch.from_sequences(tokens, [torch.arange(n) > n // 3 for n in lengths])


Outcome = tuple[list[Tensor], Tensor]


def outcome(model: Actor | CriticModel, batch: PackedBatch) -> Outcome:
    """What a model says of a row, and the flat gradient of a loss in which every number counts
    differently.
    """
    model.zero_grad(set_to_none=False)
    if isinstance(model, CriticModel):
        results = [model(batch)]
    else:
        stats = model(batch, temperature=0.8, with_entropy=True)
        results = [x for x in stats if x is not None]
    weights = (torch.linspace(0.5, 1.5, x.numel()).view(x.shape) for x in results)
    sum(
        (x.float() * w.to(x.device)).sum() for x, w in zip(results, weights, strict=True)
    ).backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    return [x.detach() for x in results], torch.cat([grad.flatten() for grad in grads])
