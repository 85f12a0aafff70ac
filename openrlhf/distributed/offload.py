"""Training states away from the GPU while others need its memory, and back; a no-op on CPU."""

from __future__ import annotations

import logging
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
    if not _can_move(engine):
        return
    kinds = import_deepspeed().runtime.zero.offload_config.OffloadStateTypeEnum
    include = [
        kinds.optim_states,
        kinds.contiguous_grad_buffer,
        kinds.hp_params,
        kinds.lp_grads,
    ]
    engine.offload_states(include=include, non_blocking=False)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def reload_states(engine: DeepSpeedEngine) -> None:
    """Undo `offload_states`."""
    if _can_move(engine):
        engine.reload_states(non_blocking=False)
        torch.cuda.synchronize()


def _can_move(engine: DeepSpeedEngine) -> bool:
    reason = None
    if engine.device.type != "cuda":
        reason = "training states already are in CPU memory"
    elif engine.zero_use_cpu_optimizer():
        reason = "--adam_offload already keeps the optimizer in CPU memory"
    elif not hasattr(engine.optimizer, "offload_states"):
        reason = f"ZeRO stage {engine.zero_optimization_stage()} cannot move its states"
    if reason and reason not in _said:
        _said.add(reason)
        logger.info("Nothing is offloaded between phases: %s.", reason)
    return reason is None
