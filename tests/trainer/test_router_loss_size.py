"""What --aux_loss_coef adds to the loss of each supervised trainer: that many times the router loss
that Hugging Face computes for each sequence alone, weighted as the trainer weighs its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from openrlhf.trainer.base_trainer import BaseTrainer
from tests.tiny import make_model
from tests.trainer.test_router_loss_training import COEF, MAKERS

NUM_SAMPLES = 9  # of a step, in two micro-batches
MICRO_BATCHES = (range(5), range(5, NUM_SAMPLES))
RouterLoss = Callable[[Tensor], Tensor]  # of one sequence


class Engine(nn.Module):
    """A model that is called as it is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: object) -> object:
        return self.module(*inputs)


class Strategy:
    """Wraps models, and does nothing with them."""

    prepare_eval = staticmethod(Engine)


def of_tokens(samples: Sequence[Any], router_loss: RouterLoss) -> Tensor:
    """A sequence counts as many times as it has learnt tokens."""
    sums = [router_loss(s.token_ids) * s.loss_mask.sum() for s in samples]
    return torch.stack(sums).sum() / sum(s.loss_mask.sum() for s in samples)


def of_markers(samples: Sequence[Any], router_loss: RouterLoss) -> Tensor:
    """A text counts as many times as it has step markers."""
    sums = [router_loss(s.token_ids) * s.marker_mask.sum() for s in samples]
    return torch.stack(sums).sum() / sum(s.marker_mask.sum() for s in samples)


def of_answers(samples: Sequence[Any], router_loss: RouterLoss) -> Tensor:
    """Every answer counts once."""
    return torch.stack([router_loss(s.token_ids) for s in samples]).mean()


def of_pairs(samples: Sequence[Any], router_loss: RouterLoss) -> Tensor:
    """Both sides of every pair count a half."""
    sides = [side for s in samples for side in (s.chosen_ids, s.rejected_ids)]
    return torch.stack([router_loss(token_ids) for token_ids in sides]).mean()


EXPECTED = {
    "sft": of_tokens,
    "kd": of_tokens,
    "prm": of_markers,
    "kto": of_answers,
    "dpo": of_pairs,
    "rm": of_pairs,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("router")
    for seed, name in enumerate(("model", "other")):
        make_model(folder / name, "mixtral", hidden_size=32, initializer_range=0.2, seed=seed)
    return folder


def body_gradients(model: nn.Module) -> Tensor:
    """Gradients of all layers, flat; heads, which stand behind the routers, left out."""
    body = model.base_model
    assert isinstance(body, nn.Module)
    # The final norm stands behind the routers too: they give it no gradient.
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in body.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


def loss_and_gradient(trainer: BaseTrainer, samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Of one step on the samples."""
    counts = {**trainer.counts(samples), "reference_point": 0.3}
    trainer.engine.zero_grad()
    total = torch.zeros(())
    for rows in MICRO_BATCHES:
        loss, _ = trainer.compute_loss(trainer.collate([samples[row] for row in rows]), counts)
        loss.backward()
        total += loss.detach()
    return total, body_gradients(trainer.engine.module.model)


@pytest.mark.parametrize("name", MAKERS)
def test_the_coefficient_adds_so_many_router_losses(folder: Path, name: str) -> None:
    trainer = MAKERS[name](folder, Strategy(), Engine)  # type: ignore[operator]
    samples = [trainer.samples[row] for row in range(NUM_SAMPLES)]
    loss, gradient = loss_and_gradient(trainer, samples)
    trainer.aux_loss_coef = 0.0
    plain_loss, plain_gradient = loss_and_gradient(trainer, samples)

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    assert model.config.output_router_logits is False  # it is asked for below

    def router_loss(token_ids: Tensor) -> Tensor:
        return model(input_ids=token_ids[None], output_router_logits=True).aux_loss

    expected = EXPECTED[name](samples, router_loss)
    expected.backward()
    assert expected > 2.1  # two experts a token, used unevenly
    torch.testing.assert_close(loss - plain_loss, COEF * expected, rtol=1e-4, atol=1e-5)
    expected_gradient = COEF * body_gradients(model)
    assert expected_gradient.norm() > 0.01
    error = (gradient - plain_gradient - expected_gradient).norm()
    assert error / expected_gradient.norm() < 1e-3
