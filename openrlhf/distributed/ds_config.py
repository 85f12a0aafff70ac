"""From our flags to the dictionary DeepSpeed wants: pure functions, no DeepSpeed import.

Gradient accumulation is ours (boundaries are set by hand), so DeepSpeed sees micro-batch 1 and one
accumulation step. A user's own JSON is merged in: its "auto" values are filled, extra keys kept,
contradictions to flags named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from openrlhf.config.common import DeepSpeedConfig, OptimizerConfig
from openrlhf.config.local_paths import read_json_object
from openrlhf.errors import ConfigError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT_BUCKET_SIZE = (
    500_000_000  # DeepSpeed's; buckets are allocated, so small models get smaller ones
)

# Keys of a user's file that a flag decides; another value there is a contradiction.
FLAG_OF_KEY = {
    "zero_optimization.stage": "--zero_stage",
    "zero_optimization.zero_hpz_partition_size": "--zpg",
    "zero_optimization.overlap_comm": "--overlap_comm",
    "zero_optimization.offload_optimizer.device": "--adam_offload",
    "gradient_clipping": "--max_norm",
    "bf16.enabled": "--ds.param_dtype",
    "fp16.enabled": "--ds.param_dtype",
    "data_types.grad_accum_dtype": "--grad_accum_dtype",
    "optimizer.type": "--optim",
    "optimizer.params.lr": "--learning_rate",
    "optimizer.params.betas": "--adam_betas",
    "optimizer.params.eps": "--adam.eps",
    "optimizer.params.weight_decay": "--l2",
}
# DeepSpeed is handed micro-batches that are cut already: no flag gives the numbers it sees.
FLAG_OF_BATCHES = {
    "train_micro_batch_size_per_gpu": "--micro_train_batch_size",
    "gradient_accumulation_steps": "--train_batch_size",
    "train_batch_size": "--train_batch_size",
}


@dataclass(frozen=True)
class ModelFacts:
    """Size and type of a model, and the ranks that hold it."""

    dtype: torch.dtype
    num_parameters: int
    hidden_size: int = 1024
    num_copies: int = 1  # ranks that hold the same weights before ZeRO splits anything


def training_config(
    ds: DeepSpeedConfig, optim: OptimizerConfig, facts: ModelFacts
) -> dict[str, object]:
    """Return the DeepSpeed configuration of a model that is trained."""
    stage = effective_stage(ds, facts)
    config = {
        **_common(facts),
        "zero_optimization": _zero(ds, facts, stage),
        "gradient_clipping": optim.max_norm,
        "optimizer": _optimizer(optim),
        **_precision(ds, facts, stage),
    }
    if ds.deepcompile:
        config["compile"] = {"deepcompile": True}
    if ds.config:
        config["zero_optimization"]["stage"] = ds.zero_stage
        config = merge_user_config(config, ds.config)
        config["zero_optimization"]["stage"] = stage
    if ds.tensor_parallel_size > 1:  # the layers are split before DeepSpeed sees them
        config["tensor_parallel"] = {"autotp_size": ds.tensor_parallel_size}
        config.pop("train_batch_size", None)  # it would count the ranks of a part each
    return _for_muon(config) if optim.optim == "muon" else config


def _for_muon(config: dict[str, object]) -> dict[str, object]:
    """The optimizer itself is made in muon.py, which says why nothing is clipped."""
    del config["optimizer"]
    config["gradient_clipping"] = 0.0
    config["zero_force_ds_cpu_optimizer"] = False  # torch's AdamW may be the one that is offloaded
    if config["zero_optimization"]["stage"] == 3:  # whole gradients, or DeepSpeed refuses
        config["zero_optimization"]["reduce_scatter"] = False
    return config


def inference_config(
    ds: DeepSpeedConfig, facts: ModelFacts, *, offload: bool = False
) -> dict[str, object]:
    """Return the DeepSpeed configuration of a frozen model under ZeRO-3; `offload` keeps its
    weights in CPU memory.
    """
    zero = _zero(ds.model_copy(update={"adam_offload": False}), facts, 3)
    if offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {**_common(facts), "zero_optimization": zero, **_precision(ds, facts, 3)}


def effective_stage(ds: DeepSpeedConfig, facts: ModelFacts) -> int:
    """Return the stage DeepSpeed runs: the same mathematics as `ds.zero_stage`, at the least cost.

    On one rank nothing can be partitioned, and fp32 weights need no master copy: stages 1 and 2 are
    stage 0. In 16 bits stages 0 and 1 are stage 2: only there does DeepSpeed sum micro-batches in
    fp32 and check them.
    """
    needs_zero = ds.adam_offload or ds.enable_sleep or ds.deepcompile or ds.config is not None
    if facts.dtype != torch.float32:
        return max(2, ds.zero_stage)
    is_alone = facts.num_copies == 1 and ds.zero_stage < 3
    return 0 if is_alone and not needs_zero else ds.zero_stage


def merge_user_config(config: Mapping[str, object], path: str) -> dict[str, object]:
    """Lay a user's JSON over ours: "auto" takes our value, other keys win, contradictions to flags
    are errors.
    """
    try:
        user = read_json_object(Path(path))
    except ValueError as error:
        raise ConfigError(f"--deepspeed_config {path} {error}. Mend the file.") from None
    problems = list(_contradictions(config, user, path))
    if problems:
        raise ConfigError(problems)
    user.pop("scheduler", None)  # every value in it was "auto": the schedule is ours
    merged = _fill(config, user)
    merged.pop("train_batch_size", None)
    return merged


def _common(facts: ModelFacts) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": facts.num_copies,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


def _zero(ds: DeepSpeedConfig, facts: ModelFacts, stage: int) -> dict[str, object]:
    bucket_size = max(1, min(DEFAULT_BUCKET_SIZE, facts.num_parameters))
    zero: dict[str, object] = {
        "stage": stage,
        "overlap_comm": ds.overlap_comm,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket_size,
    }
    if ds.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if stage == 3:
        zero |= {
            "reduce_bucket_size": min(bucket_size, max(facts.hidden_size**2, 1_000_000)),
            "stage3_prefetch_bucket_size": min(bucket_size, max(facts.hidden_size**2, 1_000_000)),
            "stage3_param_persistence_threshold": 10 * facts.hidden_size,
            "stage3_max_live_parameters": DEFAULT_BUCKET_SIZE * 2,
            "stage3_max_reuse_distance": DEFAULT_BUCKET_SIZE * 2,
            "zero_hpz_partition_size": ds.zpg,
            "sub_group_size": DEFAULT_BUCKET_SIZE * 2,
        }
    return zero


def _optimizer(optim: OptimizerConfig) -> dict[str, object]:
    # torch's fused AdamW: as fast as DeepSpeed's own on every device, with nothing to compile.
    adam = {
        "betas": list(optim.adam.betas),
        "eps": optim.adam.eps,
        "weight_decay": optim.adam.weight_decay,
        "torch_adam": True,
    }
    if optim.optim == "adam":
        return {"type": "AdamW", "params": {"lr": optim.adam.lr, **adam, "fused": True}}
    muon = {"lr": optim.muon.lr, "adam_lr": optim.adam.lr, "momentum": optim.muon.momentum}
    return {"type": "Muon", "params": {**muon, **adam}}


def _precision(ds: DeepSpeedConfig, facts: ModelFacts, stage: int) -> dict[str, object]:
    config: dict[str, object] = {
        "bf16": {"enabled": facts.dtype == torch.bfloat16, "check_grad_overflow": True},
        "fp16": {"enabled": facts.dtype == torch.float16, "loss_scale": 0},
    }
    # Sums over many micro-batches lose small addends in 16 bits, so fp32 unless the user says
    # otherwise.
    grad_accum_dtype = ds.grad_accum_dtype or "fp32"
    config["data_types"] = {"grad_accum_dtype": grad_accum_dtype}
    if facts.dtype == torch.float32 and grad_accum_dtype != "fp32":
        raise ConfigError(
            f"--grad_accum_dtype {grad_accum_dtype} with fp32 parameters: "
            "add --bf16 or leave it out."
        )
    return config


def _contradictions(
    config: Mapping[str, object], user: Mapping[str, object], path: str
) -> Iterator[str]:
    ours = dict(_leaves(config))
    for key, value in _leaves(user):
        if value == "auto":
            continue
        if key.startswith("scheduler."):
            if key != "scheduler.type":
                yield (
                    f"{path}: {key} is {value}, but the schedule is set by --lr_scheduler: "
                    "remove it."
                )
        elif key in FLAG_OF_BATCHES and value != ours[key]:
            yield (
                f"{path}: {key} is {value}, but batches are cut by {FLAG_OF_BATCHES[key]}, not by "
                'DeepSpeed: write "auto" there.'
            )
        elif key in FLAG_OF_KEY and value != ours.get(key, value):
            flag = FLAG_OF_KEY[key]
            yield (
                f"{path}: {key} is {value}, but {flag} gives {ours[key]}: "
                f'write "auto" there or change {flag}.'
            )


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _fill(ours: Mapping[str, object], user: Mapping[str, object]) -> dict[str, object]:
    filled = dict(ours)
    for key, value in user.items():
        mine = ours.get(key)
        if isinstance(value, Mapping):
            filled[key] = _fill(mine if isinstance(mine, Mapping) else {}, value)
        elif value != "auto":
            filled[key] = value
    return filled
