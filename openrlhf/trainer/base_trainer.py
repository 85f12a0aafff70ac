"""The one supervised loop: epochs, optimizer steps over global batches, evaluation, logging.

A recipe subclasses it and says what a sample counts for, how samples become a batch, and what the
loss of a batch is; where batches come from and how they are spread over ranks is the same for all.
The order of samples is a pure function of seed and epoch, so every rank knows every batch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor
from typing_extensions import NotRequired

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
from openrlhf.utils.logging import RunClock, eval_line, notice, step_line, warn
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.progress import progress
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
class Position:
    """How far a run has come; what comes next follows from it, whatever the number of ranks."""

    global_step: int = 0
    epoch: int = 0
    num_samples: int = 0  # of this epoch, already used

    def after(self, num_samples: int, *, of: int) -> Position:
        """The position one batch later, in a set of `of` samples."""
        step, num_used = self.global_step + 1, self.num_samples + num_samples
        if num_used >= of:
            return Position(step, self.epoch + 1, 0)
        return Position(step, self.epoch, num_used)


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
        budget = config.train.token_budget
        return cls(
            batch_size=config.train.batch_size,
            micro_batch_size=config.train.micro_batch_size,
            max_epochs=config.train.max_epochs,
            seed=config.train.seed,
            logging_steps=config.logger.logging_steps,
            eval_steps=config.eval.steps,
            max_tokens=budget and budget * config.ds.ring_attn_size,
        )

    def num_updates(self, num_samples: int) -> int:
        """Optimizer steps of a run; the last batch of an epoch may be smaller."""
        return self.num_updates_from(Position(), num_samples)

    def num_updates_from(self, position: Position, num_samples: int) -> int:
        """Optimizer steps that are left."""
        per_epoch = -(-num_samples // self.batch_size)
        num_done_now = num_samples - position.num_samples
        left_now = -(-num_done_now // self.batch_size)
        return max(0, (self.max_epochs - position.epoch - 1) * per_epoch + left_now)

    def cut(self, lengths: Sequence[int]) -> list[list[int]]:
        """Micro-batches of a rank's samples, as indices into them."""
        if self.max_tokens is None:
            return fixed_batches(len(lengths), self.micro_batch_size)
        return token_budget_batches(lengths, self.max_tokens)


class LoopParts(TypedDict):
    """What the loop of every trainer is given, whatever its loss."""

    samples: SampleSet[Any]
    settings: LoopSettings
    tracker: Tracker
    eval_samples: NotRequired[SampleSet[Any] | None]


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
        self.position = Position()
        self.pending = Metrics()  # of the steps since the last line that was logged
        self.clock = RunClock(0)
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

    def prepare(self, rows: Sequence[int], samples: SampleSet[SampleT]) -> dict[str, float]:
        """Numbers that need a whole batch before its loss; they join the denominators. All ranks
        call, with the same rows.
        """
        return {}

    def summarise(self, values: dict[str, float]) -> dict[str, float]:
        """Numbers to report beside the reduced metrics of an evaluation."""
        return {}

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return self.position.global_step

    @property
    def is_finished(self) -> bool:
        """Whether every epoch is done."""
        return self.position.epoch >= self.settings.max_epochs

    def fit(self, *, after_step: Callable[[], None] | None = None) -> None:
        """Train from where the run stands to its end; `after_step` is called when all of a step is
        done, its log line and evaluation too.
        """
        self.clock = RunClock(self.global_step)
        for rows in self.batches_left():
            self.pending.merge(self.train_step(rows))
            self.position = self.position.after(len(rows), of=len(self.samples))
            if self.is_due(self.settings.logging_steps):
                self._log()
            if self._is_evaluation_due():
                self._evaluate_and_log()
            if after_step is not None:
                after_step()
        self.tracker.close()

    def batches_left(self) -> Iterator[list[int]]:
        """Rows of every global batch from where the run stands to its end."""
        start = self.position.num_samples
        for epoch in range(self.position.epoch, self.settings.max_epochs):
            yield from self.batches(epoch, start=start)
            start = 0

    def batches(self, epoch: int, *, start: int = 0) -> Iterator[list[int]]:
        """Rows of every global batch of an epoch, from its `start`th sample on; the same on every
        rank.
        """
        sampler = EpochSampler(len(self.samples), self.settings.seed)
        order = sampler.order(epoch).tolist()[start:]
        for batch in fixed_batches(len(order), self.settings.batch_size):
            yield [order[place] for place in batch]

    def eval_batches(self, num_samples: int) -> list[list[int]]:
        """Rows of every batch of an evaluation: batches of a step's size, in file order."""
        return fixed_batches(num_samples, self.settings.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands, as JSON; the same on every rank."""
        return {"position": asdict(self.position), "num_bad_steps": self._num_bad_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.position = Position(**state["position"])
        self._num_bad_steps = state["num_bad_steps"]
        left = self.settings.num_updates_from(self.position, len(self.samples))
        self.num_updates = self.global_step + left

    def train_step(self, rows: Sequence[int]) -> Metrics:
        """One optimizer step over a global batch; answers this rank's metrics."""
        start = time.monotonic()
        self.engine.train()
        share = self.share_of(rows, self._lengths)
        micro_batches = [[self.samples[row] for row in part] for part in share.micro_batches]
        denominators = self._denominators(micro_batches) | self.prepare(rows, self.samples)
        metrics = Metrics()
        count = share.num_micro_batches
        with progress(f"step {self.global_step + 1}", count, is_shown=count > 1) as advance:
            for index in range(count):
                own = micro_batches[index] if index < len(micro_batches) else []
                loss = self._micro_loss(own, denominators, metrics)
                self.engine.backward(loss, is_last_micro_batch=index == count - 1)
                advance()
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
        lengths, metrics = self.eval_samples.lengths.tolist(), Metrics()
        with progress("evaluating", len(lengths), is_shown=self.strategy.is_main) as advance:
            for rows in self.eval_batches(len(lengths)):
                share = self.share_of(rows, lengths)
                numbers = self.prepare(rows, self.eval_samples)
                for index in range(share.num_micro_batches):
                    part = share.micro_batches[index] if index < len(share.micro_batches) else []
                    samples = [self.eval_samples[row] for row in part]
                    self._micro_loss(samples, self.counts(samples) | numbers, metrics)
                advance(len(rows))
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

    def is_due(self, interval: int) -> bool:
        """Whether what is done every `interval` steps, and after the last, is to be done now."""
        return self.global_step % interval == 0 or self.global_step == self.num_updates

    def _is_evaluation_due(self) -> bool:
        if self.settings.eval_steps == -1:
            return self.position.num_samples == 0  # an epoch has just ended
        return self.is_due(self.settings.eval_steps)

    def _evaluate_and_log(self) -> None:
        if self.eval_samples is None:
            return
        values = self.evaluate()
        if self.strategy.is_main:
            notice(eval_line(self.global_step, values))
            self.tracker.log(self.global_step, values)

    def _log(self) -> None:
        values = self._reduced(self.pending)
        self.pending = Metrics()
        if self.strategy.is_main and values:
            notice(step_line(self.global_step, self.num_updates, values, self.clock))
            self.tracker.log(self.global_step, values)

    def _reduced(self, metrics: Metrics) -> dict[str, float]:
        """The metrics of all ranks as numbers."""
        merged = Metrics()
        for part in all_gather_object(metrics, group=self.strategy.dp_group):
            merged.merge(part)
        return merged.values()
