"""The states of an engine parameter by parameter: what a run on another number of ranks, or at
another ZeRO stage, goes on from.

DeepSpeed's converter (`ds_to_universal`) writes them from the shards of ZeRO 1 to 3; what ZeRO 0
writes is whole as it is. They are read here, not by DeepSpeed: 0.19.8 reads them at the stage that
wrote them only, and gives every parameter group of ZeRO-3 the weight decay of the first.
"""

from __future__ import annotations

import io
import shutil
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from openrlhf.distributed import manifest
from openrlhf.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MOMENTS = ("exp_avg", "exp_avg_sq")
NO_SETTINGS = ("params", "lr", "_ds_source_param_group_id")  # of a parameter group
WHOLE_FILE = "mp_rank_00_model_states.pt"  # weights and optimizer of ZeRO 0

States = dict[str, Tensor]  # of one parameter: "fp32" and MOMENTS


def facts_of(engine: DeepSpeedEngine) -> dict[str, object]:
    """What a later `load` has to know of the optimizer beside tensors, as JSON."""
    optimizer = engine.basic_optimizer
    names = {id(p): name for name, p in engine.module.named_parameters()}
    steps = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    return {
        "step": max(steps, default=0),
        "groups": [
            {key: value for key, value in group.items() if key not in NO_SETTINGS}
            for group in optimizer.param_groups
        ],
        # In the order of the optimizer's states; ZeRO 1 to 3 have tensors of their own there.
        "names": [names.get(id(p)) for group in optimizer.param_groups for p in group["params"]],
    }


def folder_of(folder: Path) -> Path:
    """Where the states of an engine whose shards are in `folder` stand by parameter."""
    return folder.with_name(f"{folder.name}_universal")


def convert(folder: Path, *, num_workers: int = 1) -> Path:
    """Write the states of an engine by parameter beside its shards, unless that was done before;
    one process calls. The files have to be trusted.
    """
    target = folder_of(folder)
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
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ds_to_universal.main(args)
    for path in (*staged.glob("states/*_model_states.pt"), staged / "latest_universal"):
        path.unlink()  # copies of files beside it
    manifest.seal(staged, target, {"source": folder.name})
    return target


@torch.no_grad()
def load(engine: DeepSpeedEngine, folder: Path, facts: dict[str, Any]) -> None:
    """Give the engine the weights and the optimizer's states of the engine that wrote `folder`;
    all ranks call, the main one has converted before. `facts` are those of the writer.
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
    """This rank's part of a tensor as ZeRO-3 cuts it: equal parts, the last one padded."""
    size, group = parameter.ds_tensor.numel(), parameter.ds_process_group
    padding = size * torch.distributed.get_world_size(group) - whole.numel()
    padded = nn.functional.pad(whole.flatten(), (0, padding))
    return padded.narrow(0, size * torch.distributed.get_rank(group), size)


def _empty_state(
    optimizer: torch.optim.Optimizer, tensor: Tensor, step: float
) -> dict[str, Tensor]:
    """The state that AdamW would have of a tensor, with moments of zero."""
    state = {"step": torch.tensor(step, device=tensor.device)}
    state |= {key: torch.zeros_like(tensor) for key in MOMENTS}
    optimizer.state[tensor] = state
    return state


def _by_parameter(folder: Path) -> Callable[[str], States]:
    """Read what `convert` wrote."""
    root = folder_of(folder) / "states" / "zero"

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
    """Read what ZeRO 0 wrote."""
    file = torch.load(folder / WHOLE_FILE, map_location="cpu", weights_only=True, mmap=True)
    indices = {name: index for index, name in enumerate(facts["optimizer"]["names"])}

    def read(name: str) -> States:
        state = file["optimizer"]["state"][indices[name]]
        return {"fp32": file["module"][name], **{key: state[key] for key in MOMENTS}}

    return read
