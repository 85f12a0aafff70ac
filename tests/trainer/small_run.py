"""A supervised run in small: a net of two layers on random vectors, started as a command starts."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.commands.train_supervised import Checkpointer
from openrlhf.config.cli import parse_config
from openrlhf.config.common import CheckpointConfig, DeepSpeedConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.distributed.checkpoints import DataIdentity, open_checkpoints
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import stored_parameters
from openrlhf.trainer.base_trainer import BaseTrainer, Inputs
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.tracker import Tracker

# 21 samples are batches of 8, 8, 5: step 2 is inside the first epoch, step 3 is its end. Steps are
# logged in pairs: what is logged at step 4 began before a checkpoint of step 3.
FLAGS = (
    "--pretrain m --dataset d --train_batch_size 8 --micro_train_batch_size 2 --max_epochs 2 "
    "--seed 5 --logging_steps 2 --learning_rate 1e-2 --l2 0.1 --max_norm 0.5 --lr_scheduler cosine"
)
CONFIG = parse_config(SFTConfig, FLAGS.split()).config
NUM_SAMPLES, NUM_STEPS = 21, 6
IDENTITY = DataIdentity("tokens", NUM_SAMPLES)


class Vectors:
    """Random vectors, each 3 'tokens' long."""

    costs = lengths = torch.full((NUM_SAMPLES,), 3)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(6, generator=torch.Generator().manual_seed(index))


@dataclass
class Rows:
    """A batch."""

    token_ids: Tensor

    def to(self, device: torch.device | str) -> "Rows":
        return Rows(self.token_ids.to(device))


class VectorTrainer(BaseTrainer[Tensor, Rows]):
    """The mean square of what a small net makes of vectors; its dropout draws random numbers."""

    name = "vectors"

    def __init__(self, config: Any, inputs: Inputs, strategy: DeepSpeedStrategy) -> None:
        super().__init__(config, inputs, strategy)
        self.seen: list[list[int]] = []

    @classmethod
    def load_model(cls, config: Any, model_path: str) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 17), nn.LayerNorm(17), nn.Dropout(0.3), nn.Linear(17, 4))

    def train_step(self, rows: Sequence[int]) -> Metrics:
        self.seen.append(list(rows))
        return super().train_step(rows)

    def counts(self, batch: Rows) -> dict[str, float]:
        return {"num_samples": float(len(batch.token_ids))}

    def collate(self, samples: Sequence[Tensor]) -> Rows:
        return Rows(torch.stack(list(samples)))

    def export(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text("{}")

    def compute_loss(
        self, batch: Rows, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        squares = self.engine(batch.token_ids).pow(2).sum(-1)
        metrics = Metrics()
        metrics.add("loss", squares.mean().item(), weight=len(squares))
        return squares.sum() / denominators["num_samples"], metrics


def make_trainer(options: dict, run_dir: Path, resume_step: int | None, seed: int) -> VectorTrainer:
    strategy = DeepSpeedStrategy(DeepSpeedConfig(**options), seed=seed)
    strategy.setup()
    inputs = Inputs("", None, Vectors(), Vectors())  # type: ignore[arg-type]
    trainer = VectorTrainer(CONFIG, inputs, strategy)
    if strategy.is_main:
        trainer.tracker = Tracker(run_dir)
        if resume_step is not None:
            trainer.tracker.rewind(resume_step)
    return trainer


def config_of(root: Path, **changes: object) -> CheckpointConfig:
    return CheckpointConfig(path=str(root)).model_copy(update=changes)


def weights_of(trainer: VectorTrainer) -> list[Tensor]:
    return [tensor.clone() for _, tensor in stored_parameters(trainer.engine.module)]


class Stop(Exception):
    """Ends a run after the step that was asked for."""


def run(
    options: dict, root: Path, config: CheckpointConfig, *, seed: int = 1, stop: int | None = None
) -> dict:
    """One start of a command: resumes if told to, trains, says what it did."""
    checkpoints = open_checkpoints(config, IDENTITY)
    trainer = make_trainer(options, root / "run", checkpoints.resume_step, seed)
    checkpointer = Checkpointer(trainer, checkpoints)
    checkpointer.resume()
    lrs = []

    def after_step() -> None:
        checkpointer.after_step()
        lrs.append(trainer.engine.lr)
        if trainer.global_step == stop:
            raise Stop

    with suppress(Stop), checkpoints.finishing():
        trainer.fit(after_step=after_step)
    return {
        "resume_step": checkpoints.resume_step,
        "seen": trainer.seen,
        "lrs": lrs,
        "weights": weights_of(trainer),
        "num_updates": trainer.num_updates,
        "steps": checkpoints.store.steps(),
        "random": torch.rand(2).tolist(),
    }
