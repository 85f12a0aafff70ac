"""What DeepSpeed keeps of one engine, in a folder: written by all ranks, read without running code.

DeepSpeed's files are pickles. They are read by torch's restricted reader, which knows tensors,
plain containers and the few DeepSpeed classes named here, and calls nothing else; anything else in
a file is refused by name before a byte of it is loaded.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from openrlhf.distributed import collectives, universal
from openrlhf.distributed.collectives import noting
from openrlhf.distributed.manifest import write_json
from openrlhf.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

ENGINE = "engine.json"


def save(engine: DeepSpeedEngine, folder: Path, facts: dict[str, object]) -> None:
    """Write weights and optimizer into `folder`, `facts` (JSON) beside them; all ranks call.

    Frozen weights, such as the base of an adapter, are left out: a start brings them. If one rank
    fails, all raise CheckpointError.
    """
    problems: list[str] = []
    with _replaced(engine, problems):
        engine.save_checkpoint(
            str(folder.parent),
            tag=folder.name,
            save_latest=False,
            exclude_frozen_parameters=has_frozen(engine),
        )
    if collectives.is_main():
        content = {
            "zero_stage": engine.zero_optimization_stage(),
            "world_size": collectives.world_size(),
            "tp_size": max(1, engine.autotp_size()),
            "trained": trained_names(engine),
            "optimizer": universal.facts_of(engine),
            **facts,
        }
        with noting(problems):
            write_json(folder / ENGINE, content)
    _raise_together(problems)


def load(engine: DeepSpeedEngine, folder: Path, *, is_universal: bool = False) -> dict[str, Any]:
    """Restore weights and optimizer from `folder`; return the facts saved with them.

    All ranks call; if one finds a reason to refuse, all raise CheckpointError and nothing is
    loaded. `is_universal` allows that another number of ranks or ZeRO stage wrote it: the states
    are then converted to stand by parameter.
    """
    problems: list[str] = []
    facts: dict[str, Any] = {}
    with noting(problems):
        facts = _read_facts(engine, folder, is_universal=is_universal)
        if collectives.is_main():
            refuse_code_in(folder)
    _raise_together(problems)
    if fits(engine, facts):
        _load_shards(engine, folder, problems)
    else:
        with noting(problems):
            if collectives.is_main():
                convert(folder)
        _raise_together(problems)
        with noting(problems):
            universal.load(engine, folder, facts)
    _raise_together(problems)
    return facts


def _load_shards(engine: DeepSpeedEngine, folder: Path, problems: list[str]) -> None:
    """Restore what an engine of the same stage and number of ranks wrote."""
    with _replaced(engine, problems):
        # Their names were compared above where not all weights are in the files.
        is_strict = not has_frozen(engine)
        loaded, _ = engine.load_checkpoint(
            str(folder.parent), tag=folder.name, load_module_strict=is_strict
        )
    if loaded is None:
        problems.append(f"{folder} holds no weights for this engine.")


def fits(engine: DeepSpeedEngine, facts: Mapping[str, Any]) -> bool:
    """Return True if the shards of a checkpoint are cut as this engine's are."""
    stage, num_ranks = facts["zero_stage"], facts["world_size"]
    is_same_cut = stage == 0 or num_ranks == collectives.world_size()
    has_same_parts = facts.get("tp_size", 1) == max(1, engine.autotp_size())
    return is_same_cut and has_same_parts and stage == engine.zero_optimization_stage()


def convert(folder: Path, *, num_workers: int = 1) -> None:
    """Have the states that `save` wrote stand by parameter beside them; one process calls."""
    if _facts_in(folder)["zero_stage"] > 0:  # ZeRO 0 cuts nothing up
        refuse_code_in(folder)
        universal.convert(folder, num_workers=num_workers)


def has_frozen(engine: DeepSpeedEngine) -> bool:
    """Whether the model has weights that are not trained."""
    return not all(parameter.requires_grad for parameter in engine.module.parameters())


def trained_names(engine: DeepSpeedEngine) -> list[str]:
    """Names of the trained weights of a model that has others; empty where all are trained."""
    if not has_frozen(engine):
        return []
    return sorted(name for name, p in engine.module.named_parameters() if p.requires_grad)


def refuse_code_in(folder: Path) -> None:
    """Raise CheckpointError if a file of DeepSpeed's in the folder would run code."""
    for path in sorted(folder.rglob("*.pt")):
        refuse_code(path)


def refuse_code(path: Path) -> None:
    """Raise CheckpointError if a file names anything but tensors and DeepSpeed's known classes."""
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
    """The classes beside tensors that DeepSpeed's own files hold; none does anything when made."""
    from deepspeed.runtime.fp16.loss_scaler import (  # noqa: PLC0415 - after DS_ACCELERATOR is set
        DynamicLossScaler,
        LossScaler,
    )
    from deepspeed.runtime.zero.config import ZeroStageEnum  # noqa: PLC0415 - as above
    from deepspeed.utils.tensor_fragment import fragment_address  # noqa: PLC0415 - as above

    return [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]


@contextmanager
def _replaced(engine: DeepSpeedEngine, problems: list[str]) -> Iterator[None]:
    """A block in which DeepSpeed reads and writes files our way.

    A rank whose write fails goes on to DeepSpeed's barriers, where the others wait for it.
    """

    def write(state_dict: dict, path: str) -> None:
        with noting(problems), open(path, "wb") as file:
            torch.save(state_dict, file)
            file.flush()
            os.fsync(file.fileno())

    def read(path: str, map_location: object = None) -> dict:
        with safe_globals(known_classes()):
            return torch.load(path, map_location=map_location, weights_only=True)

    files = engine.checkpoint_engine
    files.save, files.load = write, read
    engine._copy_recovery_script = lambda path: None  # a script has no place among data
    try:
        yield
    finally:
        del files.save, files.load, engine._copy_recovery_script


def _raise_together(problems: list[str]) -> None:
    everyones = collectives.gather_problems(problems)
    if everyones:
        raise CheckpointError(" ".join(everyones))


def _read_facts(engine: DeepSpeedEngine, folder: Path, *, is_universal: bool) -> dict[str, Any]:
    """The facts of a checkpoint that this engine can go on from."""
    facts = _facts_in(folder)
    stage, world_size = facts["zero_stage"], facts["world_size"]
    tp_size, own_tp_size = facts.get("tp_size", 1), max(1, engine.autotp_size())
    if tp_size != own_tp_size:
        raise CheckpointError(
            f"{folder} was written with --ds_tensor_parallel_size {tp_size}. Type that in place of "
            f"{own_tp_size}, or leave --load_checkpoint out and start from an export."
        )
    can_convert = "optimizer" in facts and tp_size == 1
    if not fits(engine, facts) and not (is_universal and can_convert):
        more = "Add --use_ds_universal_ckpt, or start" if can_convert else "Start"
        raise CheckpointError(
            f"{folder} was written by {world_size} ranks with ZeRO-{stage}, this run has "
            f"{collectives.world_size()} with ZeRO-{int(engine.zero_optimization_stage())}. {more} "
            f"{world_size} ranks with --zero_stage {stage}, or leave --load_checkpoint out and "
            "start from an export."
        )
    differing = set(facts.get("trained", own := trained_names(engine))) ^ set(own)
    if differing:
        raise CheckpointError(
            f"{folder} was written with other weights in training: {sorted(differing)[0]} is "
            "trained in one of the two only. Train the same layers, or leave --load_checkpoint out."
        )
    return facts


def _facts_in(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / ENGINE).read_text())
        return {"zero_stage": facts["zero_stage"], "world_size": facts["world_size"], **facts}
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / ENGINE} cannot be read ({error!r}).") from None
