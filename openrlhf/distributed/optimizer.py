"""Optimizer and learning rate of a run: parameter groups, Muon, and every Hugging Face schedule.

Muon is for the matrices of layers, AdamW for all else. Its step on a matrix is the orthogonalised
momentum, whatever the size of the gradient. Gradients are therefore not clipped: under ZeRO the
orthogonalised steps would be what is clipped.

Horizon and warm-up of a schedule are counted in optimizer updates. Update k (from 0) uses the
schedule's value at k; after the last update the rate stands at the schedule's end value and stays.
"""

import logging
import re
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from openrlhf.config.common import OptimizerConfig
from openrlhf.distributed.weights import LAYER

logger = logging.getLogger(__name__)

Group = dict[str, object]
# Counts from 1, so its last value is that of the last update, not the one behind it.
EARLY_SCHEDULERS = frozenset({"cosine_warmup_with_min_lr"})
# Norms, biases, and what Mamba layers have instead: experts and heads stack them to any shape.
VECTORS = re.compile(r"norm\.|bias$|\.A_log$|\.D$")
WSD_DECAY_RATIO = 0.2  # part of the run that warmup_stable_decay spends in its decay


def parameter_groups(model: nn.Module, optim: OptimizerConfig) -> list[Group]:
    """Return trained parameters in groups: matrices of layers, which are Muon's, first; biases and
    the weights of norms, which do not decay, last. With Muon, mark its parameters.
    """
    adam, is_muon = optim.adam, optim.optim == "muon"
    matrices = {
        name: id(parameter)
        for name, parameter in model.named_parameters()
        if len(getattr(parameter, "ds_shape", parameter.shape)) >= 2 and not VECTORS.search(name)
    }
    hidden = {id_ for name, id_ in matrices.items() if is_muon and LAYER.match(name)}
    parts: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.use_muon = id(parameter) in hidden
        # Without decay one flat buffer under ZeRO: a split would cost for nothing.
        has_decay = adam.weight_decay == 0.0 or id(parameter) in matrices.values()
        parts.setdefault((not parameter.use_muon, not has_decay), []).append(parameter)
    groups = []
    for (is_adams, has_none), params in sorted(parts.items(), key=itemgetter(0)):
        own = {"lr": adam.lr, "betas": adam.betas, "eps": adam.eps}
        if not is_adams:
            own = {"lr": optim.muon.lr, "momentum": optim.muon.momentum}
        group = {"params": params, "weight_decay": 0.0 if has_none else adam.weight_decay, **own}
        groups.append({**group, "use_muon": not is_adams} if is_muon else group)
    return groups


def make_optimizer(model: nn.Module, optim: OptimizerConfig, *, is_cuda: bool) -> Optimizer:
    """Return torch's fused AdamW, which is as fast as DeepSpeed's own with nothing to compile; or
    DeepSpeed's Muon, with that for the rest.
    """
    groups = parameter_groups(model, optim)
    if optim.optim == "adam":
        return torch.optim.AdamW(groups, lr=optim.adam.lr, fused=True)
    # Imports and would compile Newton-Schulz kernels: only where Muon is used.
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam  # noqa: PLC0415

    logger.info("Muon: gradients are not clipped, --max_norm has no effect.")
    if not is_cuda:  # compiling for a CPU takes longer than it saves, and needs a C++ compiler
        torch.compiler.set_stance("force_eager")
    optimizer = MuonWithAuxAdam(
        groups,
        adam_optimizer=torch.optim.AdamW,
        adam_optimizer_kwargs={"fused": True},
    )
    optimizer.defaults["lr"] = optim.adam.lr  # what schedules with an end value ask for
    return optimizer


def make_schedule(optimizer: Optimizer, optim: OptimizerConfig, *, num_updates: int) -> LambdaLR:
    """Return the schedule of one optimizer over `num_updates` updates; past the end the rate
    stays.
    """
    # PEFT and bitsandbytes come along: seconds, which frozen models need not wait for.
    from transformers import get_scheduler  # noqa: PLC0415

    name, ratio = optim.lr_scheduler, optim.min_lr_ratio
    decay = {"num_decay_steps": max(1, int(WSD_DECAY_RATIO * num_updates))}
    kwargs = {
        "cosine_with_min_lr": {"min_lr_rate": ratio},
        "cosine_warmup_with_min_lr": {"min_lr_rate": ratio},
        "polynomial": {"lr_end": ratio * optim.adam.lr},
        "warmup_stable_decay": {"min_lr_ratio": ratio, **decay},
    }
    # Rounded down: a run of a few updates must not spend its first one at a rate of 0.
    schedule: LambdaLR = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=int(optim.lr_warmup_ratio * num_updates),
        num_training_steps=num_updates,
        scheduler_specific_kwargs=kwargs.get(name, {}),
    )
    last = num_updates - (name in EARLY_SCHEDULERS)
    schedule.lr_lambdas = [partial(_held, factor, last) for factor in schedule.lr_lambdas]
    return schedule


def _held(factor: Callable[[int], float], last: int, num_done: int) -> float:
    return factor(min(num_done, last))


def resume_schedule(schedule: LambdaLR, state: dict[str, Any]) -> None:
    """Take up where `state_dict` was taken, at the peak rate of then; shape and length are this
    schedule's own.
    """
    schedule.load_state_dict(state)
    groups = schedule.optimizer.param_groups
    for group, peak, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = peak * factor(schedule.last_epoch)
