"""Ranks of ZeRO of which one has pictures and the other none, against one process."""

from pathlib import Path

import pytest
import torch

from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import stored_parameters
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.utils.images import ImageProcessor, read_picture
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.vision_families import FAMILIES
from tests.distributed.spawn import run_ranks
from tests.helpers import tiny_vision

PAD, NUM_STEPS = 8, 3
SEEN, READ = [3, PAD, 90, 1, 4], [3, 91, 92, 1, 4, 93]


def row(folder: Path, *, has_picture: bool) -> PackedBatch:
    """A row of one sequence with a picture of two tokens, or of text."""
    processor = ImageProcessor.load(str(folder / "model"))
    pictures = [read_picture(tiny_vision.noise(28, 56))] if has_picture else []
    ids = torch.tensor(processor.expand(SEEN if has_picture else READ, pictures))
    mask = (torch.arange(len(ids)) > 0) & (ids != PAD)
    return PackedBatch.from_sequences([ids], [mask]).with_pictures([pictures], processor)


def train(folder: Path, *, stage: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """Weights after steps in which one rank sees and the other reads, by turns."""
    strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage))
    strategy.setup()
    actor = Actor(load_causal_lm(folder / "model"))
    optim = OptimizerConfig(adam=AdamConfig(lr=1e-3, eps=1e-3), lr_scheduler="constant")
    engine = strategy.prepare_train(actor, optim, num_updates=NUM_STEPS)
    for step in range(NUM_STEPS):
        rows = [row(folder, has_picture=(step + k) % 2 == 0) for k in range(2)]
        own = rows if num_ranks == 1 else [rows[strategy.topology.rank]]
        for place, batch in enumerate(own):
            loss = -engine(batch).logprobs.sum() / 10
            engine.backward(loss, is_last_micro_batch=place == len(own) - 1)
        engine.step()
    return {name: tensor.clone() for name, tensor in stored_parameters(engine.module)}


def two_ranks(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [train(folder, stage=stage, num_ranks=2) for stage in (2, 3)]


def one_rank(folder: Path) -> dict[str, torch.Tensor]:
    return train(folder, stage=2, num_ranks=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "internvl", "idefics3"])
def test_a_rank_without_pictures_takes_its_part_in_zero(kind, tmp_path):
    tiny_vision.make(kind, tmp_path / "model")
    [expected] = run_ranks(one_rank, 1, tmp_path)
    before = dict(stored_parameters(load_causal_lm(tmp_path / "model")))
    moved = {name: (tensor - before[name]).abs().max() for name, tensor in expected.items()}
    tower = {*FAMILIES[kind].tower}
    assert max(value for name, value in moved.items() if tower & {*name.split(".")}) > 1e-4
    for found in run_ranks(two_ranks, 2, tmp_path)[0]:
        for name, tensor in expected.items():
            assert (found[name] - tensor).abs().max() < 1e-6, name
