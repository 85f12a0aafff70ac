"""The training back end of a process: one object that starts the process group and
wraps models.

Knows DeepSpeed and the topology; does not know what a model computes or where batches come from.
"""

from __future__ import annotations

import logging
import math
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from openrlhf.config.common import DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed import collectives
from openrlhf.distributed.backend import (
    RANK_TIMEOUT_S,
    import_deepspeed,
    init_process_group,
    shut_down,
)
from openrlhf.distributed.ds_config import (
    DTYPES,
    ModelFacts,
    effective_stage,
    inference_config,
    training_config,
)
from openrlhf.distributed.optimizer import (
    LearningRate,
    make_muon,
    muon_groups,
    parameter_groups,
)
from openrlhf.distributed.tensor_parallel import split_layers
from openrlhf.distributed.topology import Topology
from openrlhf.distributed.train_engine import EvalEngine, TrainEngine
from openrlhf.distributed.weights import base_model_of, hf_model_of
from openrlhf.errors import ConfigError
from openrlhf.utils.context_parallel import ContextGroup
from openrlhf.utils.progress import progress

logger = logging.getLogger(__name__)


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
        rank_timeout_s: float = RANK_TIMEOUT_S,
    ) -> None:
        self.rank_timeout_s = rank_timeout_s
        self.ds = ds
        self.seed = seed
        self.full_determinism = full_determinism
        self.topology = Topology.from_env(
            cp_size=ds.ring_attn_size, tp_size=ds.tensor_parallel_size, local_rank=local_rank
        )
        self._check_zpg()
        self.device = torch.device("cpu")
        self.dp_group: dist.ProcessGroup | None = None  # None: the whole world
        self.context: ContextGroup | None = None  # None: no row is shared

    def _check_zpg(self) -> None:
        size = min(self.ds.zpg, self.topology.world_size)
        if self.ds.zero_stage == 3 and self.topology.world_size % size:
            raise ConfigError(
                f"--zpg {size}: {self.topology.world_size} ranks cannot be divided by it. Type the "
                "number of ranks of a machine."
            )

    def setup(self) -> None:
        """Seed everything, join the process group, take the device."""
        set_seed(self.seed, full_determinism=self.full_determinism)
        self.device = init_process_group(self.topology, rank_timeout_s=self.rank_timeout_s)
        if self.topology.dp_size < self.topology.world_size:
            self.dp_group = _own_group(self.topology.dp_groups(), self.topology.rank)
            cp_group = _own_group(self.topology.cp_groups(), self.topology.rank)
            if cp_group is not None and self.topology.cp_size > 1:
                stride = self.ds.ring_attn_head_stride
                self.context = ContextGroup(cp_group, self.ds.cp_mode, stride)

    def shut_down(self) -> None:
        """Leave the process group; nothing of this strategy can be used afterwards."""
        shut_down()

    @property
    def is_main(self) -> bool:
        """True on the rank that prints and writes."""
        return self.topology.is_main

    def prepare_train(
        self, model: nn.Module, optim: OptimizerConfig, *, num_updates: int
    ) -> TrainEngine:
        """Wrap a model for training; `num_updates` is the exact horizon of the learning rate."""
        self._check_quantized(model, is_trained=True)
        model.context = self.context
        facts = self.facts_of(model)
        stage = effective_stage(self.ds, facts)
        if stage != self.ds.zero_stage:
            logger.info("ZeRO stage %d runs as stage %d here.", self.ds.zero_stage, stage)
        config = training_config(self.ds, optim, facts)
        self._split_layers(model)
        groups = parameter_groups(model, optim.adam.weight_decay)
        optimizer, max_norm = None, optim.max_norm
        if optim.optim == "muon":
            groups, max_norm = muon_groups(model, groups, optim), math.inf
            optimizer = make_muon(groups, optim, is_cuda=self.device.type == "cuda")
        if stage == 3:
            split(model, config, dtype=facts.dtype, device=self.device)
        with progress("getting the optimizer ready"):
            engine, *_ = import_deepspeed().initialize(
                model=model,
                model_parameters=groups,
                optimizer=optimizer,
                config=config,
                dist_init_required=False,
            )
        if self.topology.tp_size > 1:
            engine.first_dataloader_check.remove()  # it compares tensors only, not packed batches
        if self.ds.deepcompile:
            engine.compile()
        schedule = LearningRate(engine.basic_optimizer, optim, num_updates=num_updates)
        return TrainEngine(
            engine,
            schedule,
            max_norm=max_norm,
            device=self.device,
            dp_group=self.dp_group,
            use_universal_ckpt=self.ds.use_universal_ckpt,
        )

    def prepare_eval(self, model: nn.Module, *, offload: bool = False) -> EvalEngine:
        """Wrap a frozen model; it is sharded under ZeRO-3 or when its weights are to live in CPU
        memory. Parts of layers stay on the device.
        """
        self._check_quantized(model, is_trained=False)
        model.context = self.context
        model.requires_grad_(requires_grad=False).eval()
        facts = self.facts_of(model)
        if is_quantized(model):  # packed weights have no type to change
            return EvalEngine(model.to(self.device), self.device)
        self._split_layers(model)
        if self.topology.tp_size > 1 or (self.ds.zero_stage < 3 and not offload):
            return EvalEngine(model.to(self.device, dtype=facts.dtype), self.device)
        config = inference_config(self.ds, facts, offload=offload)
        split(model, config, dtype=facts.dtype, device=self.device)
        engine, *_ = import_deepspeed().initialize(
            model=model, config=config, dist_init_required=False
        )
        engine.eval()
        return EvalEngine(engine, self.device)

    def _split_layers(self, model: nn.Module) -> None:
        if self.topology.tp_size > 1:
            split_layers(model, hf_model_of(model), self.topology.tp_size)

    def facts_of(self, model: nn.Module) -> ModelFacts:
        """Size and parameter type of a model here; `auto`, and a model in 4 bits, keep the type it
        was loaded in.
        """
        parameters = list(model.parameters())
        floating = [p.dtype for p in parameters if p.is_floating_point()]
        asked = "auto" if is_quantized(model) else self.ds.param_dtype
        dtype = DTYPES.get(asked, floating[0])
        config = getattr(hf_model_of(model), "config", None)
        return ModelFacts(
            dtype=dtype,
            num_parameters=sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
            hidden_size=getattr(config, "hidden_size", None) or 1024,
            num_copies=self.topology.world_size // self.topology.tp_size,
        )

    def _check_quantized(self, model: nn.Module, *, is_trained: bool) -> None:
        """The same as before a run, of the model itself: a folder may hold 4-bit weights too."""
        if not is_quantized(model):
            return
        hf_model = hf_model_of(model)
        can_learn = not is_trained or base_model_of(hf_model) is not hf_model
        problems = list(self.ds.four_bit_problems(can_learn=can_learn))
        if problems:
            raise ConfigError(problems)

    def all_reduce_sum(self, values: dict[str, float]) -> dict[str, float]:
        """Return sums over the data-parallel ranks."""
        return collectives.all_reduce_sum(values, group=self.dp_group)

    def all_reduce_max(self, values: dict[str, float]) -> dict[str, float]:
        """Return maxima over the data-parallel ranks."""
        return collectives.all_reduce_max(values, group=self.dp_group)


def split(
    model: nn.Module, config: dict[str, object], *, dtype: torch.dtype, device: torch.device
) -> None:
    """Split a model in host memory over the ranks as ZeRO-3 holds it, and place its buffers.

    One parameter at a time is whole on the device. `deepspeed.initialize` would move all of the
    model there first.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # DeepSpeed takes split ones as they are
    deepspeed = import_deepspeed()
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


def set_seed(seed: int, *, full_determinism: bool = False) -> None:
    """Seed Python, NumPy and torch; `full_determinism` also refuses nondeterministic kernels, and
    has those of flash attention sum in a fixed order.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # read by transformers at every call
        torch.use_deterministic_algorithms(mode=True)


def is_quantized(model: nn.Module) -> bool:
    """Return True if the Hugging Face model inside was loaded in 4 bits."""
    return getattr(base_model_of(hf_model_of(model)), "is_quantized", False) is True


def _own_group(groups: list[list[int]], rank: int) -> dist.ProcessGroup | None:
    own = None
    for ranks in groups:  # every rank creates every group, in the same order
        group = dist.new_group(ranks)
        own = group if rank in ranks else own
    return own
