"""Move training states to CPU memory while others need the device, and back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from openrlhf.distributed.backend import import_deepspeed

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

logger = logging.getLogger(__name__)
_said: set[str] = set()


def offload_states(engine: DeepSpeedEngine) -> None:
    """Move optimizer states, gradient buffers and fp32 master weights to CPU memory; 16-bit weights
    stay.
    """
    if _can_move(engine):
        kinds = import_deepspeed().runtime.zero.offload_config.OffloadStateTypeEnum
        include = [
            kinds.optim_states,
            kinds.contiguous_grad_buffer,
            kinds.hp_params,
            kinds.lp_grads,
        ]
        with _optimizer_accepted(engine):
            engine.offload_states(include=include, non_blocking=False)
    torch.cuda.empty_cache()


def reload_states(engine: DeepSpeedEngine) -> None:
    """Undo `offload_states`."""
    if _can_move(engine):
        engine.reload_states(non_blocking=False)


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


def _can_move(engine: DeepSpeedEngine) -> bool:
    reason = None
    if engine.zero_use_cpu_optimizer():
        reason = "--adam_offload already keeps the optimizer in CPU memory"
    elif not hasattr(engine.optimizer, "offload_states"):
        reason = f"ZeRO stage {engine.zero_optimization_stage()} cannot move its states"
    if reason and reason not in _said:
        _said.add(reason)
        logger.info("Nothing is offloaded between phases: %s.", reason)
    return reason is None
