"""What the tests of losses share: samples in a list, and the gradient of one optimizer step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from openrlhf.trainer.base_trainer import BaseTrainer
from tests.distributed.test_train_engine import full_gradients


@contextmanager
def caught_gradients(trainer: BaseTrainer) -> Iterator[list[Tensor]]:
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
