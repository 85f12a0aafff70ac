"""The training back end of a process: one object that starts the process group and wraps models,
and DeepSpeed's configuration from our flags.

Knows DeepSpeed and the topology; does not know what a model computes or where batches come from.
Gradient accumulation is ours (boundaries are set by hand), so DeepSpeed sees micro-batch 1 and one
accumulation step. A user's own JSON is merged in: its "auto" values are filled, extra keys kept,
contradictions to flags named.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from openrlhf.config.cli import leaves
from openrlhf.config.common import DeepSpeedConfig, OptimizerConfig, RunConfig, clashes
from openrlhf.distributed import collectives
from openrlhf.distributed.tensor_parallel import split_layers
from openrlhf.distributed.topology import Topology
from openrlhf.distributed.train_engine import (
    EvalEngine,
    TrainEngine,
    make_optimizer,
    make_schedule,
    sum_in_fp32,
)
from openrlhf.distributed.weights import hf_model_of
from openrlhf.errors import ConfigError
from openrlhf.utils.console import warn, warn_once
from openrlhf.utils.context_parallel import ContextGroup
from openrlhf.utils.packing import base_model_of
from openrlhf.utils.progress import progress
from openrlhf.utils.tensors import DTYPES

# Gradients that travel at once; buckets are allocated, so small models get smaller ones.
MAX_BUCKET_SIZE = 50_000_000

# Keys of a user's file that flags decide; another value there is a contradiction.
FLAG_OF_KEY = {
    "zero_optimization.stage": "--zero_stage",
    "zero_optimization.zero_hpz_partition_size": "--zpg",
    "zero_optimization.overlap_comm": "--overlap_comm",
    "zero_optimization.offload_optimizer.device": "--adam_offload",
    "gradient_clipping": "--max_norm",
    "bf16.enabled": "--ds.param_dtype",
    "fp16.enabled": "--ds.param_dtype",
    "data_types.grad_accum_dtype": "--grad_accum_dtype",
    "train_micro_batch_size_per_gpu": "--micro_train_batch_size",
    "gradient_accumulation_steps": "--train_batch_size",
    "train_batch_size": "--train_batch_size",
    "optimizer.params.lr": "--learning_rate",
    "optimizer.params.betas": "--adam_betas",
    "optimizer.params.eps": "--adam.eps",
    "optimizer.params.weight_decay": "--l2",
    "scheduler.params.warmup_num_steps": "--lr_warmup_ratio",
    "scheduler.params.total_num_steps": "--max_epochs",
}
STAYS = "a frozen model that was to wait in host memory stays on the device"


def get_strategy(args: Any) -> "DeepSpeedStrategy":
    """Return the training back end of a command's config, or of the flat arguments of OpenRLHF 0.8
    as far as they are there.
    """
    if isinstance(args, RunConfig):
        return DeepSpeedStrategy.of(args)
    given = {name: value for name, value in vars(args).items() if value is not None}
    ds = {name: given[name] for name in DeepSpeedConfig.model_fields if name in given}
    if given.get("bf16"):
        ds["param_dtype"] = "bf16"
    others = ("seed", "full_determinism", "local_rank")
    own = {name: given[name] for name in others if name in given}
    return DeepSpeedStrategy(DeepSpeedConfig(**ds), **own)


@dataclass(frozen=True)
class ModelSize:
    """Size and type of a model, and the ranks that hold it.

    Example: `ModelSize(torch.bfloat16, 494_032_768, num_copies=8)`
    """

    dtype: torch.dtype
    num_parameters: int
    num_copies: int = 1  # ranks that hold the same weights before ZeRO splits anything


class DeepSpeedStrategy:
    """The training back end of one process: `setup()` once, then `prepare_train` and `prepare_eval`
    per model.
    """

    def __init__(
        self,
        ds: DeepSpeedConfig,
        *,
        seed: int = 42,
        full_determinism: bool = False,
        local_rank: int = -1,
        rank_timeout_s: float = collectives.RANK_TIMEOUT_S,
    ) -> None:
        self.rank_timeout_s = rank_timeout_s
        self.ds = ds
        self.seed = seed
        self.full_determinism = full_determinism
        self.topology = Topology.from_env(
            cp_size=ds.ring_attn_size, tp_size=ds.tensor_parallel_size, local_rank=local_rank
        )
        num_ranks = self.topology.world_size
        if ds.zero_stage == 3 and num_ranks % min(ds.zpg, num_ranks):
            raise ConfigError(
                f"--zpg {ds.zpg}: {num_ranks} ranks cannot be divided by it. Type the number of "
                "ranks of a machine."
            )
        self.device = torch.device("cpu")
        self.dp_group: dist.ProcessGroup | None = None  # None: the whole world
        self.context: ContextGroup | None = None  # None: no row is shared

    @classmethod
    def of(cls, config: RunConfig) -> "DeepSpeedStrategy":
        """Return the back end of a training command."""
        train = config.train
        return cls(
            config.ds,
            seed=train.seed,
            full_determinism=train.full_determinism_enable,
            local_rank=config.local_rank,
            rank_timeout_s=train.rank_timeout_s,
        )

    def setup(self) -> None:
        """Seed everything, join the process group, take the device."""
        from transformers import trainer_utils  # noqa: PLC0415 - it is at home in models

        if self.full_determinism:  # flash attention sums in order, other such kernels are refused
            trainer_utils.enable_full_determinism(self.seed)
        else:
            trainer_utils.set_seed(self.seed)
        self.device = collectives.init_process_group(
            self.topology, rank_timeout_s=self.rank_timeout_s
        )
        if self.topology.dp_size < self.topology.world_size:
            sizes = (self.topology.dp_size, self.topology.cp_size, self.topology.tp_size)
            mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("dp", "cp", "tp"))
            self.dp_group = mesh.get_group("dp")
            if self.topology.cp_size > 1:
                stride = self.ds.ring_attn_head_stride
                self.context = ContextGroup(mesh.get_group("cp"), self.ds.cp_mode, stride)

    @property
    def is_main(self) -> bool:
        """Return True on the rank that prints and writes."""
        return self.topology.is_main

    def prepare_train(
        self, model: nn.Module, optim: OptimizerConfig, *, num_updates: int
    ) -> TrainEngine:
        """Wrap a model for training; `num_updates` is the exact horizon of the learning rate."""
        model_size = self._made_ready(model, is_trained=True)
        stage = effective_stage(self.ds, model_size)
        is_muon, is_fp32 = optim.optim == "muon", model_size.dtype == torch.float32
        if is_muon and self.ds.adam_offload and stage < 3 and not is_fp32:
            raise ConfigError(
                "--optim muon with --adam_offload in 16 bits sums micro-batches in 16 bits, which "
                "loses them. Leave --adam_offload out, or type --zero_stage 3."
            )
        config = training_config(self.ds, optim, model_size)
        self._split_layers(model)
        optimizer = make_optimizer(model, optim, is_cuda=self.device.type == "cuda")
        if stage == 3:
            split(model, config, dtype=model_size.dtype, device=self.device)
        with progress("getting the optimizer ready"):
            engine, *_ = collectives.import_deepspeed().initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False
            )
        if self.topology.tp_size > 1:
            engine.first_dataloader_check.remove()  # it compares tensors only, not packed batches
        if self.ds.deepcompile:
            engine.compile()
        if is_muon and stage in (1, 2):
            sum_in_fp32(engine.optimizer)
        return TrainEngine(
            engine,
            make_schedule(optimizer, optim, num_updates=num_updates),
            max_norm=math.inf if optim.optim == "muon" else optim.max_norm,
            device=self.device,
            use_universal_ckpt=self.ds.use_universal_ckpt,
        )

    def prepare_eval(self, model: nn.Module, *, offload: bool = False) -> EvalEngine:
        """Wrap a frozen model; it is sharded under ZeRO-3 or when its weights are to live in CPU
        memory. Parts of layers stay on the device.
        """
        model_size = self._made_ready(model, is_trained=False)
        model.requires_grad_(requires_grad=False).eval()
        if is_quantized(model):  # packed weights have no type to change
            if offload and self.is_main:
                warn(f"{STAYS}: it has weights of 4 bits")
            return EvalEngine(model.to(self.device), self.device)
        self._split_layers(model)
        ds = self.ds.model_copy(update={"adam_offload": False})
        is_whole = effective_stage(ds, model_size) < 3
        if self.topology.tp_size > 1 or (is_whole and not offload):
            if offload and self.is_main:
                warn(f"{STAYS}: its layers are split (--ds_tensor_parallel_size)")
            _cast(model, model_size.dtype)
            return EvalEngine(model.to(self.device), self.device)
        config = _common(ds, model_size, 3)
        if offload:
            config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
        split(model, config, dtype=model_size.dtype, device=self.device)
        engine, *_ = collectives.import_deepspeed().initialize(
            model=model, config=config, dist_init_required=False
        )
        engine.eval()
        return EvalEngine(engine, self.device)

    def _split_layers(self, model: nn.Module) -> None:
        if self.topology.tp_size > 1:
            split_layers(model, hf_model_of(model), self.topology.tp_size)

    def _made_ready(self, model: nn.Module, *, is_trained: bool) -> ModelSize:
        """Tell a model who shares its rows; return its size and its type here: `auto`, and a model
        in 4 bits, keep the type it was loaded in.
        """
        model.context = self.context
        hf_model, asked = hf_model_of(model), self.ds.param_dtype
        if is_quantized(model):  # also without the flag, of a folder that holds 4-bit weights
            asked = "auto"
            can_learn = not is_trained or base_model_of(hf_model) is not hf_model
            if problems := list(self.ds.four_bit_problems(can_learn=can_learn)):
                raise ConfigError(problems)
        parameters = list(model.parameters())
        loaded = next(p.dtype for p in parameters if p.is_floating_point())
        return ModelSize(
            dtype=DTYPES.get(asked, loaded),
            num_parameters=sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
            num_copies=self.topology.world_size // self.topology.tp_size,
        )

    def all_reduce_sum(self, values: dict[str, float]) -> dict[str, float]:
        """Return sums over the data-parallel ranks."""
        parts = collectives.all_gather_object(values, group=self.dp_group)
        return {name: float(sum(part[name] for part in parts)) for name in values}


def split(
    model: nn.Module, config: dict[str, object], *, dtype: torch.dtype, device: torch.device
) -> None:
    """Split a model in host memory over the ranks as ZeRO-3 holds it, and place its buffers.

    One parameter at a time is whole on the device. `deepspeed.initialize` would move all of the
    model there first.
    """
    _cast(model, dtype)  # DeepSpeed takes split ones as they are
    deepspeed = collectives.import_deepspeed()
    # The ranks of --zpg: DeepSpeed makes their group for the first model of a process only.
    has_zpg = config["zero_optimization"]["zero_hpz_partition_size"] > 1
    get_group = deepspeed.utils.groups._get_zero_param_intra_parallel_group
    deepspeed.zero.Init(
        module=model,
        config_dict_or_path=config,
        dtype=dtype,
        zero_param_parallel_group=get_group() if has_zpg else None,
    )
    for module in model.modules():  # every rank holds all buffers, and nothing else moves them
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    torch.cuda.empty_cache()


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Give parameters a type. Buffers keep theirs, as in DeepSpeed: rotary frequencies in bf16
    would be other positions.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def is_quantized(model: nn.Module) -> bool:
    """Return True if the Hugging Face model inside was loaded in 4 bits."""
    return getattr(base_model_of(hf_model_of(model)), "is_quantized", False) is True


def training_config(
    ds: DeepSpeedConfig, optim: OptimizerConfig, model_size: ModelSize
) -> dict[str, object]:
    """Return the DeepSpeed configuration of a model that is trained."""
    stage = effective_stage(ds, model_size)
    config = {**_common(ds, model_size, stage), "gradient_clipping": optim.max_norm}
    if ds.config:
        merge_user_config(config, ds)
    if ds.deepcompile:
        config["compile"] = {"deepcompile": True}
    if ds.tensor_parallel_size > 1:  # the layers are split before DeepSpeed sees them
        config["tensor_parallel"] = {"autotp_size": ds.tensor_parallel_size}
        del config["train_batch_size"]  # it would count the ranks of a part each
    if optim.optim == "muon":
        config["gradient_clipping"] = 0.0  # its steps would be what is clipped
        # It needs whole gradients. ZeRO-3 refuses slices, ZeRO-2 loses those of Adam's parameters
        # that share a bucket with Muon's (DeepSpeed 0.19.8).
        config["zero_optimization"]["reduce_scatter"] = False
    return config


def effective_stage(ds: DeepSpeedConfig, model_size: ModelSize) -> int:
    """Return the stage DeepSpeed runs: the same mathematics as `ds.zero_stage`, at the least cost.

    On one rank nothing can be partitioned: stage 3, which takes two to five times the host's time
    and more memory, is stage 2 (unless a user's JSON may offload parameters, or the optimizer is
    offloaded: stage 3 alone sums gradients in host memory), and fp32 weights need no master copy:
    all are stage 0. In 16 bits stages 0 and 1 are stage 2: only there does DeepSpeed sum
    micro-batches in fp32 and check them. Nor does it clip gradients of split layers as a whole
    elsewhere. Stage 0 cannot move states to host memory: where that is asked for, it is stage 1.
    """
    is_alone, moves_states = model_size.num_copies == 1, ds.adam_offload or ds.enable_sleep
    stage = max(ds.zero_stage, 1) if moves_states else ds.zero_stage
    if is_alone and ds.config is None and not ds.adam_offload:
        stage = min(stage, 2)
    if model_size.dtype != torch.float32 or ds.tensor_parallel_size > 1:
        return max(2, stage)
    needs_zero = moves_states or ds.deepcompile or ds.config is not None
    return 0 if is_alone and not needs_zero else stage


def merge_user_config(config: dict[str, Any], ds: DeepSpeedConfig) -> None:
    """Lay the JSON of `ds.config` over ours: "auto" takes our value, other keys win.

    Raises ConfigError for what is no JSON object, and for every contradiction to a flag.
    """
    try:
        user = dict(leaves(json.loads(Path(str(ds.config)).read_text("utf-8"))))
    except (ValueError, AttributeError) as error:
        message = f"--deepspeed_config {ds.config} is not a JSON object ({error}). Mend the file."
        raise ConfigError(message) from error
    ours = {
        "zero_optimization.offload_optimizer.device": "none",  # left out where it is so
        "zero_optimization.zero_hpz_partition_size": 1,
        **dict(leaves(config)),
        "zero_optimization.stage": ds.zero_stage,
    }
    set_by_user = {key: value for key, value in user.items() if value != "auto"}
    problems = [
        f'{ds.config}: {key} is {value}, but {FLAG_OF_KEY[key]} decides it: write "auto" there.'
        for key, value in set_by_user.items()
        if key in FLAG_OF_KEY and value != ours.get(key)
    ]
    weights = set_by_user.get("zero_optimization.offload_param.device", "none")
    if ds.enable_sleep and weights != "none":  # DeepSpeed has no states to move then
        problems += clashes((f"offload_param in {ds.config}", "--deepspeed_enable_sleep", True))
    if problems:
        raise ConfigError(problems)
    others = {key: value for key, value in set_by_user.items() if key not in FLAG_OF_KEY}
    unused = [key for key in others if key.startswith(("optimizer.", "scheduler."))]
    if unused and collectives.is_main():
        decide = "--optim and --lr_scheduler decide, with their settings."
        warn_once(f"{ds.config}: not used: {', '.join(unused)}. {decide}")
    for key in others.keys() - {*unused}:
        value, (*parents, last) = others[key], key.split(".")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value


def _common(ds: DeepSpeedConfig, model_size: ModelSize, stage: int) -> dict[str, object]:
    zero: dict[str, object] = {
        "stage": stage,
        "overlap_comm": ds.overlap_comm,
        "contiguous_gradients": True,
        "reduce_bucket_size": max(1, min(MAX_BUCKET_SIZE, model_size.num_parameters)),
    }
    if ds.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if stage == 3:
        zero["zero_hpz_partition_size"] = ds.zpg if ds.zero_stage == 3 else 1
    # Sums over many micro-batches lose small addends in 16 bits.
    grad_accum_dtype = (
        "fp32" if model_size.dtype == torch.float32 else ds.grad_accum_dtype or "fp32"
    )
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": model_size.num_copies,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW may be the one that is offloaded
        "zero_optimization": zero,
        "bf16": {"enabled": model_size.dtype == torch.bfloat16, "check_grad_overflow": True},
        "fp16": {"enabled": model_size.dtype == torch.float16, "loss_scale": 0},
        "data_types": {"grad_accum_dtype": grad_accum_dtype},
    }
