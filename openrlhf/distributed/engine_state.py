"""The state of one DeepSpeed engine in a folder: written by all ranks, read without running code.

DeepSpeed's files are pickles: they are scanned before they are loaded, and loaded by torch's
restricted reader, which knows tensors, plain containers and the few DeepSpeed classes named here.

Another number of ranks, or another ZeRO stage, goes on from states that stand parameter by
parameter, as DeepSpeed's converter writes them. What ZeRO 0 writes is whole as it is.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from openrlhf.distributed import collectives, manifest
from openrlhf.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

ENGINE = "engine.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
NO_SETTINGS = ("params", "lr", "_ds_source_param_group_id")  # of a parameter group
WHOLE_FILE = "mp_rank_00_model_states.pt"  # weights and optimizer of ZeRO 0
FORCE_RESTRICTED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # also where a library asks for anything else

States = dict[str, Tensor]  # of one parameter: "fp32" and MOMENTS


def save(engine: DeepSpeedEngine, folder: Path, facts: dict[str, object]) -> None:
    """Write weights and optimizer into `folder`, `facts` (JSON) beside them; all ranks call.

    Frozen weights, such as the base of an adapter, are left out: a start loads them. If one rank
    fails, all raise CheckpointError.
    """
    problems: list[str] = []

    def write(state_dict: dict, path: str) -> None:
        try:
            with open(path, "wb") as file:
                torch.save(state_dict, file)
        except (OSError, RuntimeError) as error:  # the others wait in DeepSpeed's barriers
            problems.append(str(error))

    def write_all() -> None:
        with _replacing(engine, write):
            engine.save_checkpoint(
                str(folder.parent),
                tag=folder.name,
                save_latest=False,
                exclude_frozen_parameters=_has_frozen(engine),
            )
        if problems:
            raise CheckpointError(" ".join(problems))
        if collectives.is_main():
            manifest.write_json(folder / ENGINE, _facts_of(engine) | facts)

    collectives.together(write_all)


def load(engine: DeepSpeedEngine, folder: Path, *, is_universal: bool = False) -> dict[str, Any]:
    """Restore weights and optimizer from `folder`; return the facts saved with them.

    All ranks call; if one finds a reason to refuse, all raise CheckpointError and nothing is
    loaded. `is_universal` allows another number of ranks or ZeRO stage to have written it: the
    states are then converted to stand by parameter.
    """
    facts = collectives.together(lambda: _read_facts(engine, folder, is_universal=is_universal))
    collectives.on_main(lambda: refuse_code_in(folder))
    if _fits(engine, facts):
        collectives.together(lambda: _load_shards(engine, folder))
    else:
        collectives.on_main(lambda: convert(folder))
        collectives.together(lambda: _load_by_parameter(engine, folder, facts))
    return facts


def convert(folder: Path, *, num_workers: int = 1) -> Path:
    """Write the states that `save` wrote by parameter beside them, unless that was done before, and
    return where; one process calls.
    """
    target = folder.with_name(f"{folder.name}_universal")
    if _facts_in(folder)["zero_stage"] == 0:  # which cuts nothing up
        return folder
    refuse_code_in(folder)
    if target.exists():
        try:
            manifest.verify(target)
            return target
        except CheckpointError:
            shutil.rmtree(target)
    # 0.19.8 compiles nothing at this import, but takes seconds.
    from deepspeed.checkpoint import ds_to_universal  # noqa: PLC0415

    staged = target.with_name(f"{manifest.TEMPORARY}{target.name}")
    shutil.rmtree(staged, ignore_errors=True)
    args = Namespace(
        input_folder=str(folder),
        output_folder=str(staged / "states"),
        num_extract_workers=num_workers,
        num_merge_workers=num_workers,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), _restricted_reading():
        ds_to_universal.main(args)
    for path in (*staged.glob("states/*_model_states.pt"), staged / "latest_universal"):
        path.unlink()  # copies of files beside it
    manifest.seal(staged, target, {"source": folder.name})
    return target


def refuse_code_in(folder: Path) -> None:
    """Raise CheckpointError if a file of DeepSpeed's in the folder names anything but tensors and
    DeepSpeed's known classes.
    """
    for path in sorted(folder.rglob("*.pt")):
        try:
            with safe_globals(known_classes()):
                unknown = get_unsafe_globals_in_checkpoint(path)
        except (ValueError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} is no file that torch wrote ({error}).") from None
        if unknown:
            raise CheckpointError(
                f"{path} would run code: it names {', '.join(sorted(unknown))}. "
                "Do not load checkpoints from a source you do not trust."
            )


def known_classes() -> list[Callable[..., object]]:
    """Return the classes beside tensors in DeepSpeed's own files; none does anything when made."""
    from deepspeed.runtime.fp16.loss_scaler import (  # noqa: PLC0415 - after DS_ACCELERATOR is set
        DynamicLossScaler,
        LossScaler,
    )
    from deepspeed.runtime.zero.config import ZeroStageEnum  # noqa: PLC0415 - as above
    from deepspeed.utils.tensor_fragment import fragment_address  # noqa: PLC0415 - as above

    return [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]


@contextmanager
def _restricted_reading() -> Iterator[None]:
    """Have every torch.load in the block know tensors and DeepSpeed's classes only."""
    before = os.environ.get(FORCE_RESTRICTED)
    os.environ[FORCE_RESTRICTED] = "1"
    try:
        with safe_globals(known_classes()):
            yield
    finally:
        os.environ.pop(FORCE_RESTRICTED)
        if before is not None:
            os.environ[FORCE_RESTRICTED] = before


@contextmanager
def _replacing(engine: DeepSpeedEngine, write: Callable[[dict, str], None]) -> Iterator[None]:
    """Have DeepSpeed write its files with `write`, and no recovery script among the data."""
    files = engine.checkpoint_engine
    files.save = write
    engine._copy_recovery_script = lambda path: None
    try:
        yield
    finally:
        del files.save, engine._copy_recovery_script


def _load_shards(engine: DeepSpeedEngine, folder: Path) -> None:
    """Restore what an engine of the same stage and number of ranks wrote."""
    with _restricted_reading():
        # Their names were compared before where not all weights are in the files.
        is_strict = not _has_frozen(engine)
        loaded, _ = engine.load_checkpoint(
            str(folder.parent), tag=folder.name, load_module_strict=is_strict
        )
    if loaded is None:
        raise CheckpointError(f"{folder} holds no weights for this engine.")


def _facts_of(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return what a later `load` has to know beside tensors, as JSON."""
    optimizer = engine.basic_optimizer
    names = {id(p): name for name, p in engine.module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    steps = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    return {
        "zero_stage": engine.zero_optimization_stage(),
        "world_size": collectives.world_size(),
        "tp_size": max(1, engine.autotp_size()),
        "trained": _trained_names(engine),
        "optimizer": {
            "step": max(steps, default=0),
            "groups": [
                {key: value for key, value in group.items() if key not in NO_SETTINGS}
                for group in optimizer.param_groups
            ],
            # In the order of the optimizer's states; ZeRO 1 to 3 have tensors of their own there.
            "names": [names.get(id(p)) for p in parameters],
        },
    }


def _fits(engine: DeepSpeedEngine, facts: Mapping[str, Any]) -> bool:
    """Return True if the shards of a checkpoint are cut as this engine's are."""
    stage, num_ranks = facts["zero_stage"], facts["world_size"]
    is_same_cut = stage == 0 or num_ranks == collectives.world_size()
    return is_same_cut and stage == engine.zero_optimization_stage()


def _has_frozen(engine: DeepSpeedEngine) -> bool:
    return not all(parameter.requires_grad for parameter in engine.module.parameters())


def _trained_names(engine: DeepSpeedEngine) -> list[str]:
    """Return the names of the trained weights of a model that has others; none if all are."""
    return sorted(name for name, _ in _trained(engine)) if _has_frozen(engine) else []


def _read_facts(engine: DeepSpeedEngine, folder: Path, *, is_universal: bool) -> dict[str, Any]:
    """Return the facts of a checkpoint; raise CheckpointError if this engine cannot use it."""
    facts = _facts_in(folder)
    stage, world_size = facts["zero_stage"], facts["world_size"]
    tp_size, own_tp_size = facts["tp_size"], max(1, engine.autotp_size())
    if tp_size != own_tp_size:
        raise CheckpointError(
            f"{folder} was written with --ds_tensor_parallel_size {tp_size}. Type that in place of "
            f"{own_tp_size}, or leave --load_checkpoint out and start from an export."
        )
    if not _fits(engine, facts) and not (is_universal and tp_size == 1):
        more = "Add --use_ds_universal_ckpt, or start" if tp_size == 1 else "Start"
        raise CheckpointError(
            f"{folder} was written by {world_size} ranks with ZeRO-{stage}, this run has "
            f"{collectives.world_size()} with ZeRO-{int(engine.zero_optimization_stage())}. {more} "
            f"{world_size} ranks with --zero_stage {stage}, or leave --load_checkpoint out and "
            "start from an export."
        )
    differing = set(facts["trained"]) ^ set(_trained_names(engine))
    if differing:
        raise CheckpointError(
            f"{folder} was written with other weights in training: {sorted(differing)[0]} is "
            "trained in one of the two only. Train the same layers, or leave --load_checkpoint out."
        )
    return facts


def _facts_in(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / ENGINE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / ENGINE} cannot be read ({error!r}).") from None


@torch.no_grad()
def _load_by_parameter(engine: DeepSpeedEngine, folder: Path, facts: dict[str, Any]) -> None:
    """Give the engine the weights and moments of the engine that wrote `folder`, whatever its stage
    and ranks were.

    DeepSpeed 0.19.8 itself would read them at the stage that wrote them only, and give every
    parameter group of ZeRO-3 the weight decay of the first.
    """
    stage = int(engine.zero_optimization_stage())
    read = _whole_file(folder, facts) if facts["zero_stage"] == 0 else _by_parameter(folder)
    put = {0: _put_whole, 3: _put_split}.get(stage, _put_flat)
    put(engine, read, float(facts["optimizer"]["step"]))
    groups = engine.basic_optimizer.param_groups
    for group, saved in zip(groups, facts["optimizer"]["groups"], strict=True):
        for key, value in saved.items():
            group[key] = tuple(value) if isinstance(value, list) else value


def _trained(engine: DeepSpeedEngine) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]


def _put_whole(engine: DeepSpeedEngine, read: Callable[[str], States], step: float) -> None:
    """ZeRO 0: every rank holds all."""
    optimizer = engine.basic_optimizer
    for name, parameter in _trained(engine):
        states = read(name)
        parameter.copy_(states["fp32"].view_as(parameter))
        state = _empty_state(optimizer, parameter, step)
        for key in MOMENTS:
            state[key].copy_(states[key].view_as(parameter))


def _put_flat(engine: DeepSpeedEngine, read: Callable[[str], States], step: float) -> None:
    """ZeRO 1 and 2: a rank optimizes a part of one flat tensor for each group."""
    from deepspeed.utils import (  # noqa: PLC0415 - after DS_ACCELERATOR is set
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    zero = engine.optimizer
    for flat in zero.single_partition_of_fp32_groups:
        _empty_state(zero.optimizer, flat, step)
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()
    for name, parameter in _trained(engine):
        states = read(name)
        safe_set_full_fp32_param(parameter, states["fp32"])
        for key in MOMENTS:
            safe_set_full_optimizer_state(parameter, states[key], key)
    zero.update_lp_params()


def _put_split(engine: DeepSpeedEngine, read: Callable[[str], States], step: float) -> None:
    """ZeRO 3: a rank holds and optimizes a part of each parameter."""
    from deepspeed.utils import (  # noqa: PLC0415 - after DS_ACCELERATOR is set
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    zero = engine.optimizer
    for flat in zero.fp32_partitioned_groups_flat:
        _empty_state(zero.optimizer, flat, step)
    zero.checkpoint_event_prologue()  # parameters that stay whole are split meanwhile
    for name, parameter in _trained(engine):
        states = {key: _own_part(parameter, tensor) for key, tensor in read(name).items()}
        parameter.ds_tensor.copy_(states["fp32"])
        safe_set_local_fp32_param(parameter, states["fp32"])
        for key in MOMENTS:
            safe_set_local_optimizer_state(parameter, states[key], key)
    zero.checkpoint_event_epilogue()


def _own_part(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor as ZeRO-3 cuts it: equal parts, the last one padded."""
    size, group = parameter.ds_tensor.numel(), parameter.ds_process_group
    padding = size * torch.distributed.get_world_size(group) - whole.numel()
    padded = nn.functional.pad(whole.flatten(), (0, padding))
    return padded.narrow(0, size * torch.distributed.get_rank(group), size)


def _empty_state(
    optimizer: torch.optim.Optimizer, tensor: Tensor, step: float
) -> dict[str, Tensor]:
    """Give a tensor the state that AdamW would have of it, with moments of zero, and return it."""
    state = {"step": torch.tensor(step, device=tensor.device)}
    state |= {key: torch.zeros_like(tensor) for key in MOMENTS}
    optimizer.state[tensor] = state
    return state


def _by_parameter(folder: Path) -> Callable[[str], States]:
    """Return a reader of what `convert` wrote."""
    root = folder.with_name(f"{folder.name}_universal") / "states" / "zero"

    def read(name: str) -> States:
        states = {}
        for key in ("fp32", *MOMENTS):
            path = root / name / f"{key}.pt"
            if not path.is_file():
                raise CheckpointError(f"{path} is missing: {folder} holds no such state.")
            found = torch.load(path, map_location="cpu", weights_only=True)
            states[key] = found if isinstance(found, Tensor) else found["param"]
        return states

    return read


def _whole_file(folder: Path, facts: dict[str, Any]) -> Callable[[str], States]:
    """Return a reader of what ZeRO 0 wrote."""
    file = torch.load(folder / WHOLE_FILE, map_location="cpu", weights_only=True, mmap=True)
    indices = {name: index for index, name in enumerate(facts["optimizer"]["names"])}

    def read(name: str) -> States:
        state = file["optimizer"]["state"][indices[name]]
        return {"fp32": file["module"][name], **{key: state[key] for key in MOMENTS}}

    return read
