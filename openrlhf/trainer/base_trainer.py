"""The one supervised loop: epochs, optimizer steps over global batches, evaluation, logging.

A recipe subclasses it: which rows are its samples, which model is trained, what a sample counts
for, how samples become a batch, and the loss of a batch. The rest is the same for all. The order of
samples is a pure function of seed and epoch, so every rank knows every batch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from openrlhf.algorithms.balancing import (
    balanced_partitions,
    fixed_batches,
    token_budget_batches,
)
from openrlhf.config.common import RunConfig
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.datasets.sampler import EpochSampler
from openrlhf.distributed.collectives import all_gather_object
from openrlhf.distributed.export import export_hf
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.distributed.weights import hf_model_of
from openrlhf.errors import NumericsError
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import add_lora
from openrlhf.models.loading import disable_dropout, load_causal_lm
from openrlhf.utils.logging import RunClock, eval_line, notice, step_line, warn
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import Batch
from openrlhf.utils.progress import progress
from openrlhf.utils.tokenizer import Tokenizer
from openrlhf.utils.tracking import Tracker

MAX_BAD_STEPS = 3  # in a row; a step whose gradient is not finite changes nothing and is counted

SampleT = TypeVar("SampleT")
SampleT_co = TypeVar("SampleT_co", covariant=True)
BatchT = TypeVar("BatchT", bound=Batch)
ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)


class SampleSet(Protocol[SampleT_co]):
    """Samples by index, with the number of tokens of each."""

    @property
    def lengths(self) -> Tensor:
        """Return the tokens of every sample, (len,) int64."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> SampleT_co: ...


@dataclass(frozen=True)
class Position:
    """The progress of a run; the next batch follows from it, whatever the number of ranks."""

    global_step: int = 0
    epoch: int = 0
    num_samples: int = 0  # of this epoch, already used

    def after(self, num_samples: int, *, of: int) -> Position:
        """Return the position one batch later, in a set of `of` samples."""
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

    def num_updates(self, num_samples: int, position: Position = Position()) -> int:
        """Return the optimizer steps of a run, or those left behind `position`; the last batch of
        an epoch may be smaller.
        """
        per_epoch = -(-num_samples // self.batch_size)
        left_now = -(-(num_samples - position.num_samples) // self.batch_size)
        return max(0, (self.max_epochs - position.epoch - 1) * per_epoch + left_now)

    def cut(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the micro-batches of a rank's samples, as indices into them."""
        if self.max_tokens is None:
            return fixed_batches(len(lengths), self.micro_batch_size)
        return token_budget_batches(lengths, self.max_tokens)


@dataclass(frozen=True)
class Inputs:
    """Everything that is read and checked before a model is loaded."""

    model_path: str
    tokenizer: Tokenizer
    samples: SampleSet[Any]
    eval_samples: SampleSet[Any] | None = None


@dataclass(frozen=True)
class SupervisedRun(Generic[ConfigT]):
    """The parts of a trainer, once its model is ready to train."""

    config: ConfigT
    inputs: Inputs
    strategy: DeepSpeedStrategy
    model: nn.Module  # the module that `engine` wraps
    engine: TrainEngine
    settings: LoopSettings
    tracker: Tracker


class BaseTrainer(ABC, Generic[SampleT, BatchT]):
    """Trains one model on samples; a recipe gives samples, model and loss."""

    name: ClassVar[str]  # of the command

    def __init__(self, run: SupervisedRun[Any]) -> None:
        self.run = run
        self.strategy = run.strategy
        self.engine = run.engine
        self.samples: SampleSet[SampleT] = run.inputs.samples
        self.eval_samples: SampleSet[SampleT] | None = run.inputs.eval_samples
        self.settings = run.settings
        self.tracker = run.tracker
        self.num_updates = run.settings.num_updates(len(self.samples))
        self.position = Position()
        self.pending = Metrics()  # of the steps since the last line that was logged
        self.clock = RunClock(0)
        self._num_bad_steps = 0
        self._lengths = self.samples.lengths.tolist()

    @classmethod
    def check(cls, config: Any, tokenizer: Tokenizer) -> None:
        """Raise ConfigError for what only the tokenizer and the files can tell."""

    @classmethod
    def other_models(cls, config: Any) -> Sequence[str]:
        """Return the models beside the trained one that read every sample."""
        return ()

    @classmethod
    def load_model(cls, config: Any, model_path: str) -> nn.Module:
        """Load the module to train."""
        return load_actor(config, model_path)

    def export(self, path: Path) -> None:
        """Write the trained model at `path` in Hugging Face format; all ranks call."""
        export_hf(hf_model_of(self.run.model), self.run.inputs.tokenizer, path)

    @abstractmethod
    def counts(self, samples: Sequence[SampleT]) -> dict[str, float]:
        """Return what samples add to each denominator of the loss, such as `{"num_tokens": 17}`."""

    @abstractmethod
    def collate(self, samples: Sequence[SampleT]) -> BatchT:
        """Pack samples into one batch."""

    @abstractmethod
    def compute_loss(
        self, batch: BatchT, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """Return the batch's part, (), of the loss of the whole step, and its metrics.

        `denominators` are the counts of the step over all micro-batches and ranks.
        """

    def prepare(self, rows: Sequence[int], samples: SampleSet[SampleT]) -> dict[str, float]:
        """Return numbers that need a whole batch before its loss; they join the denominators. All
        ranks call, with the same rows.
        """
        return {}

    def summarise(self, values: dict[str, float]) -> dict[str, float]:
        """Return numbers to report beside the reduced metrics of an evaluation."""
        return {}

    def add_router_loss(
        self, loss_sum: Tensor, aux_loss_S: Tensor | None, weights_S: Tensor, metrics: Metrics
    ) -> Tensor:
        """Return the sum of the losses with the router losses of S sequences added, each as many
        times as its weight says.
        """
        coef = self.run.config.model.aux_loss_coef
        if not coef or aux_loss_S is None:
            return loss_sum
        aux_sum, total = (aux_loss_S * weights_S).sum(), weights_S.sum().item()
        metrics.add("aux_loss", aux_sum.item() / total, weight=total)
        return loss_sum + coef * aux_sum

    @property
    def global_step(self) -> int:
        """Return the number of optimizer steps done."""
        return self.position.global_step

    @property
    def is_finished(self) -> bool:
        """Return True once every epoch is done."""
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
            self._evaluate_if_due()
            if after_step is not None:
                after_step()
        self.tracker.close()

    def batches_left(self) -> Iterator[list[int]]:
        """Yield the rows of every global batch from where the run stands to its end; the same on
        every rank.
        """
        start, sampler = (
            self.position.num_samples,
            EpochSampler(len(self.samples), self.settings.seed),
        )
        for epoch in range(self.position.epoch, self.settings.max_epochs):
            order = sampler.order(epoch).tolist()[start:]
            for batch in fixed_batches(len(order), self.settings.batch_size):
                yield [order[place] for place in batch]
            start = 0

    def eval_batches(self, num_samples: int) -> list[list[int]]:
        """Return the rows of every batch of an evaluation: of a step's size, in file order."""
        return fixed_batches(num_samples, self.settings.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop stands, as JSON; the same on every rank."""
        return {"position": asdict(self.position), "num_bad_steps": self._num_bad_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.position = Position(**state["position"])
        self._num_bad_steps = state["num_bad_steps"]
        left = self.settings.num_updates(len(self.samples), self.position)
        self.num_updates = self.global_step + left

    def train_step(self, rows: Sequence[int]) -> Metrics:
        """Do one optimizer step over a global batch; return this rank's metrics."""
        start = time.monotonic()
        self.engine.train()
        micro_batches = [
            [self.samples[row] for row in part] for part in self.share_of(rows, self._lengths)
        ]
        own_samples = [sample for part in micro_batches for sample in part]
        denominators = self.strategy.all_reduce_sum(self.counts(own_samples))
        denominators |= self.prepare(rows, self.samples)
        metrics = Metrics()
        count = len(micro_batches)
        with progress(f"step {self.global_step + 1}", count, is_shown=count > 1) as advance:
            for index, samples in enumerate(micro_batches):
                loss = self._micro_loss(samples, denominators, metrics)
                self.engine.backward(loss, is_last_micro_batch=index == count - 1)
                advance()
        if not self._step(rows, metrics):
            return Metrics()
        seconds = time.monotonic() - start
        metrics.add("timing/step_total", seconds)
        num_tokens = sum(self._lengths[row] for row in rows)
        metrics.add("tokens_per_s", num_tokens / seconds, weight=seconds)
        return metrics

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return metrics over the whole evaluation set, all ranks together."""
        assert self.eval_samples is not None, "there is no evaluation set"
        self.engine.eval()
        lengths, metrics = self.eval_samples.lengths.tolist(), Metrics()
        with progress("evaluating", len(lengths), is_shown=self.strategy.is_main) as advance:
            for rows in self.eval_batches(len(lengths)):
                numbers = self.prepare(rows, self.eval_samples)
                for part in self.share_of(rows, lengths):
                    samples = [self.eval_samples[row] for row in part]
                    self._micro_loss(samples, self.counts(samples) | numbers, metrics)
                advance(len(rows))
        values = self._reduced(metrics)
        return {f"eval/{name}": v for name, v in {**values, **self.summarise(values)}.items()}

    def share_of(self, rows: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Return this rank's micro-batches of a batch: tokens are balanced over the ranks, and as
        many micro-batches as the busiest rank has, empty ones at the end.
        """
        own_lengths = [lengths[row] for row in rows]
        topology = self.strategy.topology
        plans = [
            [[part[i] for i in cut] for cut in self.settings.cut([own_lengths[i] for i in part])]
            for part in balanced_partitions(own_lengths, topology.dp_size)
        ]
        own, count = plans[topology.dp_rank], max(len(plan) for plan in plans)
        return [[rows[i] for i in part] for part in own] + [[] for _ in range(count - len(own))]

    def own_batches(
        self, samples: SampleSet[SampleT], rows: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[tuple[list[int], BatchT]]:
        """Yield this rank's micro-batches of rows with the rows in them; one without rows holds the
        shortest sample, and its results do not count.
        """
        spare = min(rows, key=lambda row: lengths[row])
        for part in self.share_of(rows, lengths):
            batch = self.collate([samples[row] for row in part or [spare]])
            yield part, batch.to(self.engine.device)

    def _micro_loss(
        self, samples: Sequence[SampleT], denominators: Mapping[str, float], metrics: Metrics
    ) -> Tensor:
        """Return the loss of one micro-batch; one that is empty still runs, for its collectives."""
        spare = self.samples[int(self.samples.lengths.argmin())]
        batch = self.collate(samples or [spare]).to(self.engine.device)
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
        """Return True if what is done every `interval` steps, and after the last, is due."""
        return self.global_step % interval == 0 or self.global_step == self.num_updates

    def _evaluate_if_due(self) -> None:
        every, has_ended_epoch = self.settings.eval_steps, self.position.num_samples == 0
        is_due = self.is_due(every) if every >= 1 else has_ended_epoch
        if self.eval_samples is None or not is_due:
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
        """Return the metrics of all ranks as numbers."""
        merged = Metrics()
        for part in all_gather_object(metrics, group=self.strategy.dp_group):
            merged.merge(part)
        return merged.values()


def load_actor(config: SupervisedConfig, model_path: str, *, has_dropout: bool = True) -> Actor:
    """Load the policy to train, with an adapter and gradient checkpointing when asked for.

    Without dropout the model computes the same in training and evaluation, as losses against a
    reference need it; an adapter's own dropout stays.
    """
    model = load_causal_lm(model_path, config)
    if not has_dropout:
        disable_dropout(model)
    with_aux_loss = config.model.aux_loss_coef > 0
    actor = Actor(add_lora(model, config.ds.lora), with_aux_loss=with_aux_loss)
    if config.model.gradient_checkpointing_enable:
        actor.gradient_checkpointing_enable(config.model.gradient_checkpointing_reentrant)
    return actor
