"""The loop that actor and critic share: micro-batches of one optimizer step, backward, step.

All ranks run the same number of micro-batches; a rank with fewer runs empty ones, because forward,
backward and step are collectives under ZeRO.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from openrlhf.errors import NumericsError
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.replay_buffer import MicroBatchPlan, UpdateStep
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch


class TrainEngine(Protocol):
    """What the loop needs of a training engine."""

    lr: float
    device: torch.device

    def train(self) -> None:
        """Enter training mode."""

    def backward(self, loss: Tensor, *, is_last_micro_batch: bool) -> None:
        """Accumulate gradients; the sum over ranks and micro-batches is what counts."""

    def eval(self) -> None:
        """Enter evaluation mode."""

    def step(self) -> float:
        """Update the weights; answers the global gradient norm before clipping."""


# (packed row, its experience columns, the step with its denominators, metrics to add to) -> loss ()
LossFunction = Callable[[PackedBatch, Experience, UpdateStep, Metrics], Tensor]
ReduceMax = Callable[[Mapping[str, float]], dict[str, float]]


def run_updates(
    engine: TrainEngine,
    steps: Sequence[UpdateStep],
    compute_loss: LossFunction,
    *,
    plan: MicroBatchPlan,
    reduce_max: ReduceMax,
    after_step: Callable[[], None] | None = None,
) -> Metrics:
    """Make all optimizer steps of one rollout batch, `after_step` after each of them; answers this
    rank's metrics, `grad_norm` and `lr` among them.
    """
    metrics = Metrics()
    engine.train()  # gradient checkpointing works in training mode only
    for step in steps:
        micro_batches = [step.experience.select(i) for i in _cut(step, plan)]
        num_micro_batches = int(
            reduce_max({"num_micro_batches": len(micro_batches)})["num_micro_batches"]
        )
        for index in range(num_micro_batches):
            is_last = index == num_micro_batches - 1
            if index < len(micro_batches):
                loss = _real_loss(engine, micro_batches[index], step, compute_loss, metrics)
            else:
                loss = _empty_loss(engine, step, compute_loss)
            engine.backward(loss, is_last_micro_batch=is_last)
        metrics.add("grad_norm", engine.step())
        if after_step is not None:
            after_step()
        metrics.add("lr", engine.lr, reduction="max")
    engine.eval()
    return metrics


def micro_batches_of(experience: Experience, plan: MicroBatchPlan) -> list[list[int]]:
    """Indices of the micro-batches of a share; none when the share is empty."""
    return plan.cut(experience.seq_lengths.tolist()) if len(experience) else []


def empty_experience(like: Experience) -> Experience:
    """A sample of two tokens that stands in where a rank has nothing to do."""
    columns: dict[str, Tensor | None] = {
        "seq_lengths": torch.tensor([2]),
        "num_actions": torch.tensor([1]),
        "group_ids": torch.zeros(1, dtype=torch.int64),
        "rewards": torch.zeros(1),
        "is_truncated": torch.zeros(1, dtype=torch.bool),
        "token_ids": torch.zeros(2, dtype=torch.int64),
        "action_mask": torch.tensor([False, True]),
        "rollout_logprobs": torch.zeros(1),
        "weight_versions": torch.zeros(1, dtype=torch.int32),
    }
    for name in ("old_logprobs", "ref_logprobs", "values", "advantages", "returns"):
        columns[name] = None if getattr(like, name) is None else torch.zeros(1)
    return Experience(**columns)  # type: ignore[arg-type]


def _cut(step: UpdateStep, plan: MicroBatchPlan) -> list[list[int]]:
    # At least one micro-batch everywhere: a step without samples still is an optimizer step.
    return micro_batches_of(step.experience, plan) or [[]]


def _real_loss(
    engine: TrainEngine,
    experience: Experience,
    step: UpdateStep,
    compute_loss: LossFunction,
    metrics: Metrics,
) -> Tensor:
    if len(experience) == 0:
        return _empty_loss(engine, step, compute_loss)
    experience = experience.to(engine.device)
    loss = compute_loss(experience.packed(), experience, step, metrics)
    if not math.isfinite(loss.item()):
        raise NumericsError(
            f"the loss is {loss.item()} for samples of groups "
            f"{experience.group_ids.tolist()[:8]}; weights were not changed"
        )
    return loss


def _empty_loss(engine: TrainEngine, step: UpdateStep, compute_loss: LossFunction) -> Tensor:
    experience = empty_experience(step.experience).to(engine.device)
    return compute_loss(experience.packed(), experience, step, Metrics()) * 0.0
