"""The one supervised loop: epochs, optimizer steps over global batches, evaluation, logging.

A recipe subclasses it and says what a sample counts for, how samples become a batch, and what the
loss of a batch is; where batches come from and how they are spread over ranks is the same for all.
The order of samples is a pure function of seed and epoch, so every rank knows every batch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from openrlhf.algorithms.balancing import (
    balanced_partitions,
    fixed_batches,
    token_budget_batches,
)
from openrlhf.config.run import RunConfig
from openrlhf.datasets.sampler import EpochSampler
from openrlhf.distributed.collectives import all_gather_object
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.errors import NumericsError
from openrlhf.utils.logging import eval_line, notice, step_line, warn
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.tracking import Tracker

MAX_BAD_STEPS = 3  # in a row; a step whose gradient is not finite changes nothing and is counted

SampleT = TypeVar("SampleT")
SampleT_co = TypeVar("SampleT_co", covariant=True)


class Batch(Protocol):
    """What a model takes: a packed row, perhaps with columns beside it."""

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device."""


BatchT = TypeVar("BatchT", bound=Batch)


class SampleSet(Protocol[SampleT_co]):
    """Samples by index, and how many tokens each has."""

    @property
    def lengths(self) -> Tensor:
        """Tokens of every sample, (len,) int64."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> SampleT_co: ...


@dataclass(frozen=True)
class LoopSettings:
    """Arithmetic and cadence of a supervised run."""

    batch_size: int  # samples of an optimizer step, all ranks
    micro_batch_size: int  # samples of a forward pass of one rank
    max_epochs: int = 1
    seed: int = 42
    logging_steps: int = 1
    eval_steps: int = -1  # -1: at the end of every epoch
    max_tokens: int | None = None  # token budget of a micro-batch; wins over micro_batch_size

    @classmethod
    def of(cls, config: RunConfig) -> LoopSettings:
        """Read a command's config."""
        return cls(
            batch_size=config.train.batch_size,
            micro_batch_size=config.train.micro_batch_size,
            max_epochs=config.train.max_epochs,
            seed=config.train.seed,
            logging_steps=config.logger.logging_steps,
            eval_steps=config.eval.steps,
        )

    def num_updates(self, num_samples: int) -> int:
        """Optimizer steps of a run; the last batch of an epoch may be smaller."""
        return self.max_epochs * -(-num_samples // self.batch_size)

    def cut(self, lengths: Sequence[int]) -> list[list[int]]:
        """Micro-batches of a rank's samples, as indices into them."""
        if self.max_tokens is None:
            return fixed_batches(len(lengths), self.micro_batch_size)
        return token_budget_batches(lengths, self.max_tokens)


@dataclass(frozen=True)
class Share:
    """What one rank does in one pass over a batch."""

    micro_batches: list[list[int]]  # rows of the sample set
    num_micro_batches: int  # of the rank that has most: ranks with fewer run empty ones
    num_tokens: int  # of the whole batch, all ranks


class BaseTrainer(ABC, Generic[SampleT, BatchT]):
    """Trains one model on samples; subclasses give the loss."""

    def __init__(
        self,
        strategy: DeepSpeedStrategy,
        engine: TrainEngine,
        *,
        samples: SampleSet[SampleT],
        settings: LoopSettings,
        tracker: Tracker,
        eval_samples: SampleSet[SampleT] | None = None,
    ) -> None:
        self.strategy = strategy
        self.engine = engine
        self.samples = samples
        self.eval_samples = eval_samples
        self.settings = settings
        self.tracker = tracker
        self.num_updates = settings.num_updates(len(samples))
        self.global_step = 0
        self._num_bad_steps = 0
        self._lengths = samples.lengths.tolist()

    @abstractmethod
    def counts(self, samples: Sequence[SampleT]) -> dict[str, float]:
        """What these samples add to each denominator of the loss, such as `{"num_tokens": 17}`."""

    @abstractmethod
    def collate(self, samples: Sequence[SampleT]) -> BatchT:
        """Samples as one packed batch."""

    @abstractmethod
    def empty_sample(self) -> SampleT:
        """The smallest sample there can be; stands in, weighted zero, where a rank has none."""

    @abstractmethod
    def compute_loss(
        self, batch: BatchT, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """The batch's part, (), of the loss of the whole step, and its metrics.

        `denominators` are the counts of the step over all micro-batches and ranks.
        """

    def summarise(self, values: dict[str, float]) -> dict[str, float]:
        """Numbers to report beside the reduced metrics of an evaluation."""
        return {}

    def fit(self) -> None:
        """Train all epochs."""
        pending = Metrics()
        for epoch in range(self.settings.max_epochs):
            for rows in self.batches(epoch):
                pending.merge(self.train_step(rows))
                self.global_step += 1
                if self._is_due(self.settings.logging_steps):
                    self._log(pending)
                    pending = Metrics()
                if self.settings.eval_steps > 0 and self._is_due(self.settings.eval_steps):
                    self._evaluate_and_log()
            if self.settings.eval_steps == -1:
                self._evaluate_and_log()
        self.tracker.close()

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """Rows of every global batch of an epoch, the same on every rank."""
        sampler = EpochSampler(len(self.samples), self.settings.seed)
        order = sampler.order(epoch).tolist()
        for batch in fixed_batches(len(order), self.settings.batch_size):
            yield [order[position] for position in batch]

    def train_step(self, rows: Sequence[int]) -> Metrics:
        """One optimizer step over a global batch; answers this rank's metrics."""
        start = time.monotonic()
        self.engine.train()
        share = self.share_of(rows, self._lengths)
        micro_batches = [[self.samples[row] for row in part] for part in share.micro_batches]
        denominators = self._denominators(micro_batches)
        metrics = Metrics()
        for index in range(share.num_micro_batches):
            own = micro_batches[index] if index < len(micro_batches) else []
            loss = self._micro_loss(own, denominators, metrics)
            is_last = index == share.num_micro_batches - 1
            self.engine.backward(loss, is_last_micro_batch=is_last)
        if not self._step(rows, metrics):
            return Metrics()
        seconds = time.monotonic() - start
        metrics.add("timing/step_total", seconds)
        metrics.add("tokens_per_s", share.num_tokens / seconds, weight=seconds)
        return metrics

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Metrics over the whole evaluation set, all ranks together."""
        assert self.eval_samples is not None, "there is no evaluation set"
        self.engine.eval()
        share = self.share_of(range(len(self.eval_samples)), self.eval_samples.lengths.tolist())
        metrics = Metrics()
        for index in range(share.num_micro_batches):
            part = share.micro_batches[index] if index < len(share.micro_batches) else []
            samples = [self.eval_samples[row] for row in part]
            self._micro_loss(samples, self.counts(samples), metrics)
        values = self._reduced(metrics)
        return {f"eval/{name}": v for name, v in {**values, **self.summarise(values)}.items()}

    def share_of(self, rows: Sequence[int], lengths: Sequence[int]) -> Share:
        """This rank's micro-batches of a batch: tokens are balanced over the ranks."""
        own_lengths = [lengths[row] for row in rows]
        topology = self.strategy.topology
        plans = [
            [[part[i] for i in cut] for cut in self.settings.cut([own_lengths[i] for i in part])]
            for part in balanced_partitions(own_lengths, topology.dp_size)
        ]
        return Share(
            micro_batches=[[rows[i] for i in part] for part in plans[topology.dp_rank]],
            num_micro_batches=max(len(plan) for plan in plans),
            num_tokens=sum(own_lengths),
        )

    def _denominators(self, micro_batches: Sequence[Sequence[SampleT]]) -> dict[str, float]:
        samples = [sample for part in micro_batches for sample in part]
        return self.strategy.all_reduce_sum(self.counts(samples))

    def _micro_loss(
        self, samples: Sequence[SampleT], denominators: Mapping[str, float], metrics: Metrics
    ) -> Tensor:
        """The loss of one micro-batch; one that is empty still runs, for its collectives."""
        batch = self.collate(samples or [self.empty_sample()]).to(self.engine.device)
        if samples:
            loss, own = self.compute_loss(batch, denominators)
            metrics.merge(own)
            return loss
        ones = dict.fromkeys(denominators, 1.0)
        return self.compute_loss(batch, ones)[0] * 0.0

    def _step(self, rows: Sequence[int], metrics: Metrics) -> bool:
        """Update the weights; False when the gradient was not finite and nothing was changed."""
        try:
            metrics.add("grad_norm", self.engine.step())
        except NumericsError:
            self._num_bad_steps += 1
            if self.strategy.is_main:
                warn(
                    f"step {self.global_step + 1} was skipped: its gradient is not finite "
                    f"(rows {list(rows)[:16]})."
                )
            if self._num_bad_steps > MAX_BAD_STEPS:
                raise
            return False
        self._num_bad_steps = 0
        metrics.add("lr", self.engine.lr, reduction="max")
        return True

    def _is_due(self, interval: int) -> bool:
        return self.global_step % interval == 0 or self.global_step == self.num_updates

    def _evaluate_and_log(self) -> None:
        if self.eval_samples is None:
            return
        values = self.evaluate()
        if self.strategy.is_main:
            notice(eval_line(self.global_step, values))
            self.tracker.log(self.global_step, values)

    def _log(self, metrics: Metrics) -> None:
        values = self._reduced(metrics)
        if self.strategy.is_main and values:
            notice(step_line(self.global_step, self.num_updates, values))
            self.tracker.log(self.global_step, values)

    def _reduced(self, metrics: Metrics) -> dict[str, float]:
        """The metrics of all ranks as numbers."""
        merged = Metrics()
        for part in all_gather_object(metrics, group=self.strategy.dp_group):
            merged.merge(part)
        return merged.values()
