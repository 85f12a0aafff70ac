"""A model ready to train, or ready to be asked: what trainers hold in place of DeepSpeed's engine.

The gradient of a step is the SUM, over ranks and micro-batches, of the losses passed to `backward`:
callers divide by global denominators, DeepSpeed's own averaging is undone here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from openrlhf.distributed import collectives, engine_state
from openrlhf.distributed.backend import import_deepspeed
from openrlhf.distributed.optimizer import LearningRate
from openrlhf.distributed.tensor_parallel import total_norm
from openrlhf.errors import NumericsError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

logger = logging.getLogger(__name__)

MAX_FP16_SKIPS = (
    20  # dynamic loss scaling finds its scale by overflowing; this often in a row is no search
)


class TrainEngine:
    """One trained model: forward, accumulate, step; weights out; states away and back."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        schedule: LearningRate,
        *,
        max_norm: float,
        device: torch.device,
        dp_group: dist.ProcessGroup | None = None,
        use_universal_ckpt: bool = False,
    ) -> None:
        self.engine = engine
        self.schedule = schedule
        self.device = device
        self.dp_group = dp_group  # ranks with other samples; None: all
        self.use_universal_ckpt = use_universal_ckpt
        self.num_skipped_steps = 0  # fp16 overflows in a row
        self._max_norm = max_norm
        self._loss = 0.0  # this rank's part of the step's loss, for schedules that watch it
        # Plain fp32 data parallelism: DeepSpeed clips unseen and never checks, so both are done
        # here.
        self._is_plain = not hasattr(engine.optimizer, "_global_grad_norm")
        if self._is_plain:
            engine._config.gradient_clipping = 0.0

    @property
    def module(self) -> nn.Module:
        """The model that was wrapped."""
        return self.engine.module

    @property
    def zero_stage(self) -> int:
        """The stage that runs, which may be another than the one that was asked for."""
        return int(self.engine.zero_optimization_stage())

    @property
    def lr(self) -> float:
        """Learning rate after the updates so far."""
        return self.schedule.value

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The model's forward pass."""
        return self.engine(*args, **kwargs)

    def train(self) -> None:
        """Put the model in training mode."""
        self.engine.train()

    def eval(self) -> None:
        """Put the model in evaluation mode."""
        self.engine.eval()

    def backward(self, loss: Tensor, *, is_last_micro_batch: bool) -> None:
        """Accumulate the gradient of one micro-batch; the last one of a step sums the ranks."""
        self.engine.set_gradient_accumulation_boundary(is_last_micro_batch)
        if self.schedule.needs_loss:
            self._loss += loss.item()
        self.engine.backward(loss * self.engine.dp_world_size)

    def step(self) -> float:
        """Clip, update weights and learning rate, clear gradients; the global gradient norm before
        clipping.

        A norm that is not finite leaves the weights as they are on every rank and raises
        NumericsError. In fp16 it belongs to finding the loss scale: it is logged, `inf` is
        answered, and only many in a row raise.
        """
        grad_norm = self._plain_step() if self._is_plain else self._zero_step()
        if math.isfinite(grad_norm):
            self.num_skipped_steps = 0
            self.schedule.step(self._take_loss())
            return grad_norm
        self.num_skipped_steps += 1
        if not self.engine.fp16_enabled() or self.num_skipped_steps > MAX_FP16_SKIPS:
            raise NumericsError(
                f"The gradient norm is {grad_norm}: the update was skipped and the weights are "
                "unchanged. Lower the learning rate, or look for extreme rewards or log-probs in "
                "this batch."
            )
        logger.warning(
            "fp16 gradients overflowed; the update was skipped and the loss scale lowered."
        )
        return grad_norm

    def offload_states(self) -> None:
        """Move optimizer states, gradient buffers and fp32 master weights to CPU memory, where the
        ZeRO stage can; 16-bit weights stay.
        """
        if self._can_move_states():
            kinds = import_deepspeed().runtime.zero.offload_config.OffloadStateTypeEnum
            include = [
                kinds.optim_states,
                kinds.contiguous_grad_buffer,
                kinds.hp_params,
                kinds.lp_grads,
            ]
            with _optimizer_accepted(self.engine):
                self.engine.offload_states(include=include, non_blocking=False)
        torch.cuda.empty_cache()

    def reload_states(self) -> None:
        """Bring them back before the next update."""
        if self._can_move_states():
            self.engine.reload_states(non_blocking=False)

    def save_states(self, folder: Path) -> None:
        """Write weights, optimizer and schedule into `folder`; all ranks call, all or none raise
        CheckpointError.
        """
        facts = {
            "schedule": self.schedule.state_dict(),
            "num_skipped_steps": self.num_skipped_steps,
        }
        engine_state.save(self.engine, folder, facts)

    def load_states(self, folder: Path) -> None:
        """Take up weights, optimizer and schedule from `folder`; as `save_states`."""
        facts = engine_state.load(self.engine, folder, is_universal=self.use_universal_ckpt)
        self.schedule.load_state_dict(facts["schedule"])
        self.num_skipped_steps = facts["num_skipped_steps"]

    def _can_move_states(self) -> bool:
        is_on_cpu = self.engine.zero_use_cpu_optimizer()  # --adam_offload
        return not is_on_cpu and hasattr(self.engine.optimizer, "offload_states")

    def _take_loss(self) -> float | None:
        if not self.schedule.needs_loss:
            return None
        loss, self._loss = self._loss, 0.0
        return collectives.all_reduce_sum({"loss": loss}, group=self.dp_group)["loss"]

    def _zero_step(self) -> float:
        self.engine.step()
        if getattr(self.engine.optimizer, "overflow", False):
            return math.inf
        return float(self.engine.get_global_grad_norm())

    def _plain_step(self) -> float:
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        norm = total_norm(parameters)
        clip_grads_with_norm_(parameters, self._max_norm, norm)
        grad_norm = norm.item()
        if math.isfinite(grad_norm):
            self.engine.step()
        else:
            self.engine.zero_grad()
        return grad_norm


@contextmanager
def _optimizer_accepted(engine: DeepSpeedEngine) -> Iterator[None]:
    """Let ZeRO-3 move the states of torch's AdamW.

    It asserts that the optimizer is DeepSpeed's FusedAdam, which has to be compiled. What it moves
    are `exp_avg` and `exp_avg_sq`, which torch's AdamW has too. To be removed when DeepSpeed's
    `offload_states` no longer compares the class (0.19.8 does).
    """
    from deepspeed.ops.adam import fused_adam  # noqa: PLC0415 - after DS_ACCELERATOR is set

    required = fused_adam.FusedAdam
    fused_adam.FusedAdam = type(engine.optimizer.optimizer)
    try:
        yield
    finally:
        fused_adam.FusedAdam = required


class EvalEngine:
    """One frozen model that is only asked."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device

    @property
    def module(self) -> nn.Module:
        """The model that was wrapped."""
        return getattr(self.model, "module", self.model)

    @torch.no_grad()
    def __call__(self, *args: object, **kwargs: object) -> object:
        """The model's forward pass, without gradients."""
        return self.model(*args, **kwargs)
