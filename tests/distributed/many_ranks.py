"""One rank of many, without the others: `python -m tests.distributed.many_ranks MODEL STAGE DTYPE
WORLD RANK`.

torch's fake process group answers every collective at once with this rank's own numbers, so a step
runs as on a cluster of any size, and its results mean nothing. What it shows is how much a rank
holds, what it sends, and what it writes. Above rank 0 ZeRO-3 cannot start this way: it asserts that
what rank 0 broadcasts arrives.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from openrlhf.config.common import DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed import train_engine
from openrlhf.distributed.collectives import all_or_none
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import exported_parameters, hf_model_of
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.utils.packing import PackedBatch


def counted(mode: CommDebugMode) -> dict[str, int]:
    """Return the collectives by name."""
    return {str(op).split(".")[-1].strip("_'>)"): n for op, n in mode.get_comm_counts().items()}


def walk(model_dir: str, stage: int, dtype: str) -> dict[str, object]:
    """Make a step, a checkpoint and an export as this rank of the world."""
    strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage, param_dtype=dtype))
    strategy.setup()
    model = Actor(load_causal_lm(Path(model_dir)))
    engine = strategy.prepare_train(model, OptimizerConfig(), num_updates=2)
    rows = [torch.arange(20), torch.arange(12)]
    batch = PackedBatch.from_sequences(rows, [torch.arange(len(row)) > 0 for row in rows])
    with CommDebugMode() as step:
        engine.backward(-engine(batch, temperature=1.0).logprobs.sum(), is_last_micro_batch=True)
        engine.step()
    with tempfile.TemporaryDirectory() as folder, CommDebugMode() as save:
        all_or_none(engine.take_states(Path(folder)))
        [file] = Path(folder).glob("*.pt")
        content = torch.load(file)
        for number in range(1000, 1003):  # of other ranks
            shutil.copy(file, file.with_name(f"tp0-dp{number}.pt"))
        with patch.object(train_engine, "_read", wraps=train_engine._read) as read:
            train_engine._load_parts(engine.engine, Path(folder))
    shapes = {n: [*t.shape] for n, t in exported_parameters(hf_model_of(engine.module))}
    return {
        "step": counted(step),
        "save": counted(save),
        "shapes": shapes,
        "file": file.name,
        "read": [call.args[0].name for call in read.call_args_list],
        "held": {name: [part["start"], part["fp32"].numel()] for name, part in content.items()},
        "states": sum(part["exp_avg"].numel() for part in content.values()),
        "whole": sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
    }


def main() -> None:
    """Print what the rank found, as JSON."""
    model_dir, stage, dtype, world, rank = sys.argv[1:]
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK="0")
    dist.init_process_group("fake", store=FakeStore(), rank=int(rank), world_size=int(world))
    print("\n" + json.dumps(walk(model_dir, int(stage), dtype)))


if __name__ == "__main__":
    main()
