"""The loop that actor and critic share: micro-batches of one optimizer step, backward, step.

The policy's steps may have text beside their samples, in micro-batches of its own.

All ranks run the same number of micro-batches; a rank with fewer runs empty ones, because forward,
backward and step are collectives under ZeRO.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from openrlhf.errors import NumericsError
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.pretrain_text import pack_texts
from openrlhf.trainer.ppo_utils.replay_buffer import MicroBatchPlan, UpdateStep
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.progress import Advance, no_advance


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
# (packed text, targets of the step on all ranks, metrics to add to) -> loss ()
TextLoss = Callable[[PackedBatch, int, Metrics], Tensor]
ReduceMax = Callable[[Mapping[str, float]], dict[str, float]]
MicroLoss = Callable[[], Tensor]  # the loss of one micro-batch, when its turn has come


@dataclass(frozen=True)
class UpdateHooks:
    """What else a model's updates consist of."""

    text_loss: TextLoss | None = None  # of the texts of a step, where it has any
    after_step: Callable[[], None] | None = None  # called after every optimizer step
    advance: Advance = no_advance  # of a bar over micro-batches


def run_updates(
    engine: TrainEngine,
    steps: Sequence[UpdateStep],
    compute_loss: LossFunction,
    *,
    plan: MicroBatchPlan,
    reduce_max: ReduceMax,
    hooks: UpdateHooks = UpdateHooks(),
) -> Metrics:
    """Make all optimizer steps of one rollout batch; answers this rank's metrics, `grad_norm` and
    `lr` among them.
    """
    metrics = Metrics()
    engine.train()  # gradient checkpointing works in training mode only
    num_done = 0
    for place, step in enumerate(steps):
        of_samples = _sample_losses(engine, step, compute_loss, plan, metrics)
        of_texts = _text_losses(engine, step, hooks.text_loss, plan, metrics)
        # Ranks that have fewer run empty ones, the last of their list.
        counts = reduce_max({"samples": len(of_samples) - 1, "texts": len(of_texts) - 1})
        losses = _stretched(of_samples, counts["samples"]) + _stretched(of_texts, counts["texts"])
        hooks.advance(0, num_done + (len(steps) - place) * len(losses))
        num_done += len(losses)
        for index, micro_loss in enumerate(losses):
            engine.backward(micro_loss(), is_last_micro_batch=index == len(losses) - 1)
            hooks.advance()
        metrics.add("grad_norm", engine.step())
        if hooks.after_step is not None:
            hooks.after_step()
        metrics.add("lr", engine.lr, reduction="max")
    engine.eval()
    return metrics


def _stretched(losses: Sequence[MicroLoss], count: float) -> list[MicroLoss]:
    *real, empty = losses
    return [*real, *[empty] * (int(count) - len(real))]


def _sample_losses(
    engine: TrainEngine,
    step: UpdateStep,
    compute_loss: LossFunction,
    plan: MicroBatchPlan,
    metrics: Metrics,
) -> list[MicroLoss]:
    """One for each micro-batch of samples, then an empty one."""
    parts = [step.experience.select(indices) for indices in _cut(step, plan)]
    real = [partial(_real_loss, engine, part, step, compute_loss, metrics) for part in parts]
    return [*real, partial(_empty_loss, engine, step, compute_loss)]


def _text_losses(
    engine: TrainEngine,
    step: UpdateStep,
    text_loss: TextLoss | None,
    plan: MicroBatchPlan,
    metrics: Metrics,
) -> list[MicroLoss]:
    """One for each micro-batch of text, then an empty one."""
    texts = step.texts
    if texts is None:
        return [lambda: torch.zeros(())]  # stands for none
    assert text_loss is not None, "a model without a loss for text was given some"

    def loss_of(token_ids: Sequence[Tensor], to: Metrics) -> Tensor:
        batch = pack_texts(token_ids).to(engine.device)
        loss = text_loss(batch, texts.num_tokens, to)
        if not math.isfinite(loss.item()):
            raise NumericsError(
                f"the loss of pre-training text is {loss.item()}; weights were not changed"
            )
        return loss

    cuts = plan.cut([len(ids) for ids in texts.token_ids]) if texts.token_ids else []
    real = [partial(loss_of, [texts.token_ids[i] for i in indices], metrics) for indices in cuts]
    nothing = [torch.zeros(2, dtype=torch.int64)]
    return [*real, lambda: loss_of(nothing, Metrics()) * 0.0]


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
