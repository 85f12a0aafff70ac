"""A model to train, or for forward passes alone: what trainers hold instead of DeepSpeed's engine.

The gradient of a step is the SUM, over ranks and micro-batches, of the losses passed to `backward`:
callers divide by global denominators, DeepSpeed's own averaging is undone here.

States are written in parts, by the names of parameters, so that an engine of another ZeRO stage or
number of ranks can read them. Files hold tensors and plain containers, and run no code.

Muon is for the matrices of layers, AdamW for all else. Its step on a matrix is the orthogonalised
momentum, whatever the size of the gradient. Gradients are therefore not clipped: under ZeRO the
orthogonalised steps would be what is clipped.

Horizon and warm-up of a schedule are counted in optimizer updates. Update k (from 0) uses the
schedule's value at k; after the last update the rate stands at the schedule's end value and stays.
"""

import json
import logging
import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from openrlhf.config.common import OptimizerConfig
from openrlhf.distributed import collectives, folders
from openrlhf.distributed.collectives import import_deepspeed
from openrlhf.distributed.weights import LAYER
from openrlhf.errors import CheckpointError, NumericsError, SkippedUpdate, first_line
from openrlhf.utils.memory import keep_freed_memory

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

logger = logging.getLogger(__name__)

# Updates in a row whose gradient is not finite: the last one ends the run.
MAX_SKIPS = 3
MAX_FP16_SKIPS = 20  # dynamic loss scaling finds its scale by overflowing
ENGINE = "engine.json"
SKIPPED = "num_skipped_updates"  # metric: of a step
SKIPS_IN_A_ROW = "num_skipped_updates"  # key of ENGINE
OWN_END = {"raise_error_at_min_scale": False}  # `step` ends a run of skips in its own words
WEIGHTS, STEP = "fp32", "step"  # the other keys of a part are those of the optimizer's state
MOMENTUM = "momentum_buffer"  # of Muon, in an optimizer's state
ASLEEP = "_offload_buffer"  # ends keys of DeepSpeed's own, for states that sleep
# Counts from 1, so its last value is that of the last update, not of the one after.
EARLY_SCHEDULERS = frozenset({"cosine_warmup_with_min_lr"})
# Norms, biases, and what Mamba layers have instead: experts and heads stack them to any shape.
VECTORS = re.compile(r"norm\.|bias$|\.A_log$|\.D$")
MAX_SAMPLED = 4096  # numbers of a parameter, for the size of an update
WSD_DECAY_RATIO = 0.2  # part of the run that warmup_stable_decay spends in its decay


def parameter_groups(model: nn.Module, optim: OptimizerConfig) -> list[dict[str, object]]:
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

    name, ratio = str(optim.lr_scheduler), optim.min_lr_ratio
    if name == "polynomial" and (ratio == 1 or optim.adam.lr == 0):
        name = "constant_with_warmup"  # transformers refuses a decay to where it begins
    decay = {"num_decay_steps": max(1, int(WSD_DECAY_RATIO * num_updates))}
    kwargs = {
        "cosine_with_min_lr": {"min_lr_rate": ratio},
        "cosine_warmup_with_min_lr": {"min_lr_rate": ratio},
        "polynomial": {"lr_end": ratio * optim.adam.lr},
        "warmup_stable_decay": {"min_lr_ratio": ratio, **decay},
    }
    # Rounded down: a run of a few updates must not spend its first one at a rate of 0.
    num_warmup = int(optim.lr_warmup_ratio * num_updates)
    schedule: LambdaLR = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=num_warmup,
        num_training_steps=num_updates,
        scheduler_specific_kwargs=kwargs.get(name, {}),
    )
    # A decay of no updates would be a division by zero.
    last = num_updates - (name in EARLY_SCHEDULERS or num_warmup == num_updates)
    schedule.lr_lambdas = [partial(_held, factor, last) for factor in schedule.lr_lambdas]
    return schedule


def _held(factor: Callable[[int], float], last: int, num_done: int) -> float:
    return factor(min(num_done, last))


def resume_schedule(
    schedule: LambdaLR, state: dict[str, Any], *, has_own_rate: bool = False
) -> None:
    """Go on from where `state_dict` was taken, at the peak rate of that schedule unless this one
    `has_own_rate`; shape and length are those of this schedule.
    """
    schedule.load_state_dict(state | ({"base_lrs": schedule.base_lrs} if has_own_rate else {}))
    groups = schedule.optimizer.param_groups
    for group, peak, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = peak * factor(schedule.last_epoch)


class TrainEngine:
    """One trained model: forward, accumulate, step; weights out; states away and back."""

    def __init__(
        self,
        engine: "DeepSpeedEngine",
        schedule: LambdaLR,
        *,
        max_norm: float,
        device: torch.device,
        use_universal_ckpt: bool,
    ) -> None:
        self.engine = engine
        self.schedule = schedule
        self.device = device
        if device.type == "cpu":
            keep_freed_memory()
        self.use_universal_ckpt = use_universal_ckpt
        self.num_skips_in_a_row = 0
        # Under ZeRO-0 every rank holds all, and the first of them copies.
        self._copies = self.zero_stage > 0 or _tp_and_dp_rank(engine)[1] == 0
        self._sharing = collectives.ranks_on_node(is_counted=self._copies)  # the host memory
        self.update_ratio = 0.0  # norm of the last update by that of the weights, of this rank
        self._max_norm = max_norm
        if self.zero_stage > 0:
            vars(engine.optimizer.loss_scaler).update(OWN_END)
        self._num_grads = 0  # of ZeRO-3, while they are freed
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
        """Return the stage that runs, which may be another than the one that was asked for."""
        return int(self.engine.zero_optimization_stage())

    @property
    def lr(self) -> float:
        """Return the learning rate after the updates so far."""
        return float(self.schedule.optimizer.param_groups[0]["lr"])

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the model's forward pass."""
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, is_last_micro_batch: bool) -> None:
        """Accumulate the gradient of one micro-batch; the last one of a step sums the ranks."""
        self.engine.set_gradient_accumulation_boundary(is_last_micro_batch)
        self.engine.backward(loss * self.engine.dp_world_size)

    def step(self) -> float:
        """Clip, update weights and learning rate, clear gradients; return the global gradient norm
        before clipping.

        A norm that is not finite leaves the weights as they are on every rank and raises
        SkippedUpdate, or another NumericsError for the last one in a row that is allowed. In fp16
        it belongs to finding the loss scale: it is logged, and `inf` is returned, until there are
        too many in a row.
        """
        before = _samples(self.engine)
        grad_norm = self._plain_step() if self._is_plain else self._zero_step()
        if math.isfinite(grad_norm):
            self.update_ratio = _change(before, _samples(self.engine))
            self.num_skips_in_a_row = 0
            self.schedule.step()
            return grad_norm
        self.num_skips_in_a_row += 1
        is_fp16 = self.engine.fp16_enabled()
        if (count := self.num_skips_in_a_row) >= (MAX_FP16_SKIPS if is_fp16 else MAX_SKIPS):
            raise NumericsError(
                f"the gradient was not finite in {count} updates in a row; the weights are those "
                "before them. Lower the learning rate, or look for extreme rewards or log-probs"
            )
        if not is_fp16:
            raise SkippedUpdate(f"the gradient norm is {grad_norm}")
        logger.warning(
            "fp16 gradients overflowed; the update was skipped and the loss scale lowered."
        )
        return grad_norm

    def offload_states(self) -> None:
        """Move optimizer states and fp32 master weights to CPU memory, where the ZeRO stage can;
        free gradients, which are of no use after a step. 16-bit weights stay.
        """
        if self._can_move_states():
            grads = getattr(self.engine.optimizer, "grad_partitions_flat_buffer", None)
            if grads is not None and grads.numel():  # ZeRO-3 would copy them there and back
                self._num_grads, grads.data = grads.numel(), grads.new_empty(0)
            deepspeed = import_deepspeed()
            kinds = deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum
            include = [kind for kind in kinds if kind != kinds.lp_params]
            with _optimizer_accepted(self.engine):
                self.engine.offload_states(include=include, non_blocking=False)
        torch.cuda.empty_cache()

    def reload_states(self) -> None:
        """Bring them back before the next update."""
        if not self._can_move_states():
            return
        zero, num_grads = self.engine.optimizer, self._num_grads
        if num_grads:  # in place of the copy
            dtype = zero.grad_partitions_flat_buffer.dtype
            grads = torch.zeros(num_grads, dtype=dtype, device=self.device)
            zero.lp_grad_partitions_flat_pin_buffers = grads
        self.engine.reload_states(non_blocking=False)
        if num_grads:
            zero.lp_grad_partitions_flat_pin_buffers = torch.empty(0, dtype=dtype)
            self._num_grads = 0

    def take_states(
        self,
        folder: Path,
        *,
        has_optimizer: bool = True,
        free_at_start: int | None = None,
        free_now: int | None = None,
    ) -> folders.Write:
        """Copy trained weights and optimizer (unless it is left out) to host memory; return the
        function that writes the copy into `folder`, while training may go on. `free_at_start` and
        `free_now` are those of `take_tensors`.

        Frozen weights, such as the base of an adapter, are left out: a start loads them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if collectives.is_main():
            own = {"schedule": self.schedule.state_dict(), SKIPS_IN_A_ROW: self.num_skips_in_a_row}
            folders.write_json(folder / ENGINE, _description_of(self.engine) | own)
        if not self._copies:
            return folders.nothing
        content = _content(self.engine, has_optimizer=has_optimizer)
        file = folder / _file_name(self.engine)
        is_first = self._sharing[0] == collectives.rank()
        return folders.take_tensors(
            content,
            file,
            num_sharing=len(self._sharing),
            is_first=is_first,
            free_at_start=free_at_start,
            free_now=free_now,
        )

    def num_state_bytes(self, *, has_optimizer: bool = True) -> int:
        """Return the bytes that all ranks save: weights, and moments unless the optimizer is left
        out, in fp32.
        """
        num_moments = {True: 1, False: 2}  # Muon has one
        numel = sum(
            (1 + has_optimizer * num_moments[getattr(p, "use_muon", False)])
            * getattr(p, "ds_numel", p.numel())
            for _, p in _trained(self.engine)
        )
        return torch.float32.itemsize * numel * max(1, self.engine.autotp_size())

    def load_states(self, folder: Path, *, has_own_rate: bool = False) -> None:
        """Load weights, optimizer and schedule from `folder`, and the learning rate unless this
        engine `has_own_rate`; all ranks call, all or none raise CheckpointError.
        """
        engine, is_universal = self.engine, self.use_universal_ckpt
        saved = collectives.all_or_none(
            lambda: _read_description(engine, folder, is_universal=is_universal)
        )
        zero = engine.optimizer
        if self.zero_stage == 3:
            zero.checkpoint_event_prologue()  # splits the parameters that are kept whole
        collectives.all_or_none(lambda: _load_parts(engine, folder))
        if self.zero_stage > 0:
            vars(zero.loss_scaler).update(saved["loss_scaler"], **OWN_END)
        if self.zero_stage in (1, 2):
            zero.update_lp_params()
        if self.zero_stage == 3:
            for part in _parts(engine):
                part.parameter.ds_tensor.view(-1)[: part.numel].copy_(part.of(part.flat))
            zero.checkpoint_event_epilogue()
        self.num_skips_in_a_row = saved.get(SKIPS_IN_A_ROW, 0)
        resume_schedule(self.schedule, saved["schedule"], has_own_rate=has_own_rate)

    def _can_move_states(self) -> bool:
        is_on_cpu = self.engine.zero_use_cpu_optimizer()  # --adam_offload
        return not is_on_cpu and hasattr(self.engine.optimizer, "offload_states")

    def _zero_step(self) -> float:
        zero = self.engine.optimizer
        self.engine.step()
        if getattr(zero, "overflow", False):
            if self.zero_stage in (1, 2):  # with an offloaded optimizer DeepSpeed 0.19.8 keeps them
                zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)
            return math.inf
        return float(self.engine.get_global_grad_norm())

    def _plain_step(self) -> float:
        grad_norm = clip_grad_norm_(self.module.parameters(), self._max_norm).item()
        if math.isfinite(grad_norm):
            self.engine.step()
        else:
            self.engine.zero_grad()
        return grad_norm


def sum_in_fp32(zero: Any) -> None:
    """Have DeepSpeed (0.19.8) sum Muon's gradients of micro-batches in the type that it was asked
    for: it takes those of 16-bit weights as they are.
    """
    found = zero.get_all_grad_tensors

    def cast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        return [gradient.to(dtype) for gradient in found(tensors, dtype)]

    zero.get_all_grad_tensors = cast


@contextmanager
def _optimizer_accepted(engine: "DeepSpeedEngine") -> Iterator[None]:
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
    """One frozen model, for forward passes alone."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device

    @property
    def module(self) -> nn.Module:
        """The model that was wrapped."""
        return getattr(self.model, "module", self.model)

    @torch.no_grad()
    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the model's forward pass, without gradients."""
        return self.model(*args, **kwargs)


class Partition(NamedTuple):
    """Numbers of a parameter that this rank optimizes, as part of a flat tensor.

    Example: the second half of a weight of 600 numbers, behind 1000 others in `flat`: `start` 300,
    `numel` 300, `offset` 1000.
    """

    name: str
    parameter: nn.Parameter
    start: int  # place of the first one in the parameter, laid flat
    numel: int
    flat: Tensor  # what the optimizer knows
    offset: int  # place in `flat`

    def of(self, tensor: Tensor) -> Tensor:
        """Return the numbers of this part in a tensor that is as long as `flat`."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.numel)


def _content(engine: "DeepSpeedEngine", *, has_optimizer: bool) -> dict[str, dict[str, Any]]:
    """Return the tensors that this rank optimizes, by the names of parameters, as views."""
    content, momenta = {}, _places_of_momenta(engine)
    for part in _parts(engine):
        state = engine.basic_optimizer.state.get(part.flat, {}) if has_optimizer else {}
        tensors = {WEIGHTS: part.flat, **state}
        content[part.name] = {"start": part.start} | {
            key: tensor if key == STEP else _numbers_of(part, key, tensor, momenta)[1]
            for key, tensor in tensors.items()
            if not key.endswith(ASLEEP)
        }
    return content


@torch.no_grad()
def _load_parts(engine: "DeepSpeedEngine", folder: Path) -> None:
    """Fill the tensors that the optimizer knows from the parts that any ranks wrote."""
    files, momenta = _files_with_parts(engine, folder), _places_of_momenta(engine)
    states = engine.basic_optimizer.state
    states.clear()
    for part in _parts(engine):
        num_found = 0
        for stored in (file[part.name] for file in files if part.name in file):
            for key in (k for k in stored if k != "start" and not k.endswith(ASLEEP)):
                if key == STEP:
                    states[part.flat][STEP] = stored[STEP].to(part.flat.device, copy=True)
                    continue
                target = part.flat
                if key != WEIGHTS:
                    zeros = _zeros_for(part, key, momenta)
                    target = states[part.flat].setdefault(key, zeros)
                num_copied = _copy_overlap(stored, key, *_numbers_of(part, key, target, momenta))
                num_found += num_copied if key == WEIGHTS else 0
        if num_found != part.numel:
            raise CheckpointError(
                f"{folder} lacks weights of {part.name}. Train the same layers as the run that "
                "wrote it, or leave --load_checkpoint out."
            )


def _copy_overlap(stored: dict[str, Any], key: str, start: int, held: Tensor) -> int:
    """Copy what a file has of the numbers from `start` on of a parameter; return their count."""
    is_whole = len(stored[key]) > len(stored[WEIGHTS])
    stored_start = 0 if is_whole else stored["start"]
    first = max(start, stored_start)
    last = max(min(start + len(held), stored_start + len(stored[key])), first)
    held[first - start : last - start].copy_(
        stored[key][first - stored_start : last - stored_start]
    )
    return last - first


def _numbers_of(
    part: Partition, key: str, tensor: Tensor, momenta: Mapping[int, tuple[int, int]]
) -> tuple[int, Tensor]:
    """Return the numbers of a parameter in a state of the optimizer, behind the place of the first
    one in the parameter, laid flat.
    """
    if key == MOMENTUM and id(part.parameter) in momenta:
        offset, _ = momenta[id(part.parameter)]
        return 0, tensor.detach().view(-1).narrow(0, offset, part.parameter.numel())
    return part.start, part.of(tensor)


def _zeros_for(part: Partition, key: str, momenta: Mapping[int, tuple[int, int]]) -> Tensor:
    if key == MOMENTUM and id(part.parameter) in momenta:
        return part.flat.new_zeros(momenta[id(part.parameter)][1]).detach()
    return torch.zeros_like(part.flat).detach()


def _places_of_momenta(engine: "DeepSpeedEngine") -> dict[int, tuple[int, int]]:
    """Return the place in a buffer of each parameter's momentum under ZeRO-2 with Muon, and the
    size of that buffer. It has whole matrices, also those of which a rank optimizes a part.
    """
    zero, places = engine.optimizer, {}
    if engine.zero_optimization_stage() not in (1, 2) or zero.cpu_offload:
        return {}
    for parameters in zero.params_in_partition:
        ends = list(accumulate((p.numel() for p in parameters), initial=0))
        places |= {
            id(p): (offset, ends[-1]) for p, offset in zip(parameters, ends[:-1], strict=True)
        }
    return places


def _files_with_parts(engine: "DeepSpeedEngine", folder: Path) -> list[dict[str, dict[str, Any]]]:
    """Return the content of the rank's own file, if it has the parts that this rank optimizes, or
    else that of all files. If every rank read them all, a thousand ranks would open a million.
    """
    own = folder / _file_name(engine)
    if own.exists():
        file = _read(own)
        known = {name: (part["start"], len(part[WEIGHTS])) for name, part in file.items()}
        if all(known.get(part.name) == (part.start, part.numel) for part in _parts(engine)):
            return [file]
    return [_read(path) for path in sorted(folder.glob(_file_name(engine, "*")))]


def _file_name(engine: "DeepSpeedEngine", dp_rank: int | str | None = None) -> str:
    """Return the name of the file with the states of this rank, or of another one of those with
    the same slice of the weights.
    """
    tp_rank, own_rank = _tp_and_dp_rank(engine)
    return f"tp{tp_rank}-dp{own_rank if dp_rank is None else dp_rank}.pt"


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no file of tensors: {first_line(error)} Do not load checkpoints from a "
            "source that you do not trust."
        ) from None


def _parts(engine: "DeepSpeedEngine") -> Iterator[Partition]:
    """Yield the parts of parameters that this rank optimizes."""
    stage, zero = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:  # a part of each parameter, the last ones padded
        names = {id(parameter): name for name, parameter in _trained(engine)}
        for parameters, flat in zip(
            zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True
        ):
            offset = 0
            for parameter in parameters:
                size = parameter.partition_numel()
                start = size * torch.distributed.get_rank(parameter.ds_process_group)
                numel = max(0, min(size, parameter.ds_numel - start))
                yield Partition(names[id(parameter)], parameter, start, numel, flat, offset)
                offset += size
        return
    for name, parameter in _trained(engine):
        if stage == 0:
            yield Partition(name, parameter, 0, parameter.numel(), parameter, 0)
        elif (mapping := parameter._hp_mapping) is not None:  # a part of one tensor of a group
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = zero.single_partition_of_fp32_groups[mapping.param_group_index]
            yield Partition(name, parameter, here.start, here.numel, flat, there.start)


def _samples(engine: "DeepSpeedEngine") -> Tensor:
    """Return evenly spaced numbers of what this rank optimizes, as one fp32 vector whose norm is
    about that of all: each number is scaled by the root of how many it stands for.
    """
    samples = []
    for part in _parts(engine):
        stride = max(1, part.numel // MAX_SAMPLED)
        samples.append(part.of(part.flat)[::stride].float() * math.sqrt(stride))
    return torch.cat(samples) if samples else torch.zeros(1)  # a rank may optimize nothing


def _change(before: Tensor, after: Tensor) -> float:
    """Return the norm of the change of samples by that of their values before; 0 of none."""
    norms = torch.stack([(after - before).norm(), before.norm()]).tolist()
    return norms[0] / norms[1] if norms[1] else 0.0


def _trained(engine: "DeepSpeedEngine") -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]


def _tp_and_dp_rank(engine: "DeepSpeedEngine") -> tuple[int, int]:
    """Return the rank's tensor-parallel and data-parallel rank: which slice of the weights it
    holds, and its number among those that hold the same slice.
    """
    dp_rank, tp_rank = divmod(collectives.rank(), max(1, engine.autotp_size()))
    return tp_rank, dp_rank


def _description_of(engine: "DeepSpeedEngine") -> dict[str, Any]:
    """Return the values that `load_states` needs besides tensors, as JSON."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    numbers = {} if scaler is None else vars(scaler)
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        "world_size": collectives.world_size(),
        "tp_size": max(1, engine.autotp_size()),
        "loss_scaler": {k: v for k, v in numbers.items() if isinstance(v, (int, float))},
    }


def _read_description(
    engine: "DeepSpeedEngine", folder: Path, *, is_universal: bool
) -> dict[str, Any]:
    """Return the description of a checkpoint; raise CheckpointError if this engine cannot
    use it.
    """
    saved, own = json.loads((folder / ENGINE).read_text()), _description_of(engine)
    if saved["tp_size"] != own["tp_size"]:
        raise CheckpointError(
            f"{folder} was written with --ds_tensor_parallel_size {saved['tp_size']}. Type that "
            f"in place of {own['tp_size']}, or leave --load_checkpoint out and start from an "
            "export."
        )
    cut = "{world_size} ranks with ZeRO-{zero_stage}"
    if not is_universal and cut.format_map(saved) != cut.format_map(own):
        raise CheckpointError(
            f"{folder} was written by {cut.format_map(saved)}, this run has "
            f"{cut.format_map(own)}. Add --use_ds_universal_ckpt, or start {saved['world_size']} "
            f"ranks with --zero_stage {saved['zero_stage']}, or leave --load_checkpoint out and "
            "start from an export."
        )
    return saved
