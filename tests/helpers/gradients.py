"""Gradients of optimizer steps, caught before they are applied, and log-probs in plain torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.trainer.base_trainer import BaseTrainer
from openrlhf.trainer.workers.model_worker import ModelWorker


def full_gradients(engine: TrainEngine) -> list[Tensor]:
    from deepspeed.utils import safe_get_full_grad

    plain = [p.grad for p in engine.module.parameters()]
    grads = [
        (safe_get_full_grad(p) if own is None or hasattr(p, "ds_id") else own)
        for p, own in zip(engine.module.parameters(), plain, strict=True)
    ]
    return [grad.detach().float().clone() for grad in grads]


@contextmanager
def caught_gradients(trainer: BaseTrainer | ModelWorker) -> Iterator[list[Tensor]]:
    """A block whose optimizer steps leave their gradients, caught before the update, in a list."""
    caught: list[Tensor] = []
    update = trainer.engine.step

    def step() -> float:
        caught.extend(grad.clone() for grad in full_gradients(trainer.engine))
        return update()

    trainer.engine.step = step  # type: ignore[method-assign]
    yield caught
    trainer.engine.step = update  # type: ignore[method-assign]


def step_gradient(
    trainer: BaseTrainer, micro_batch_size: int, rows: Sequence[int]
) -> tuple[Tensor, dict[str, float]]:
    """Flat gradient and metrics of one step on the rows."""
    trainer.micro_batch_size = micro_batch_size
    with caught_gradients(trainer) as caught:
        metrics = trainer.train_step(rows)
    return torch.cat([grad.flatten() for grad in caught]), trainer._reduced(metrics)


def response_logprob(model: Any, token_ids: Tensor, mask: Tensor) -> Tensor:
    """Sum of log-probs over the marked tokens of one unpacked sequence (T,), in plain torch."""
    logprobs = model(token_ids[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, token_ids[1:, None])[:, 0][mask[1:]].sum()
