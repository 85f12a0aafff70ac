"""The one supervised loop: epochs, optimizer steps over global batches, evaluation, logging.

A recipe subclasses it: which rows are its samples, which model is trained, what a sample counts
for, how samples become a batch, and the loss of a batch. The rest is the same for all. The order of
samples is a pure function of seed and epoch, so every rank knows every batch.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from openrlhf.algorithms.balancing import balanced_partitions, fixed_batches, token_budget_batches
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.datasets.sampler import epoch_order
from openrlhf.datasets.tokenized import TokenizedDataset
from openrlhf.distributed.checkpoints import DataIdentity
from openrlhf.distributed.collectives import all_gather_object, on_main
from openrlhf.distributed.export import export_hf
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import SKIPPED
from openrlhf.distributed.weights import hf_model_of, master_parameters
from openrlhf.errors import ConfigError, NumericsError, SkippedUpdate
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import add_lora
from openrlhf.models.loading import disable_dropout, load_causal_lm
from openrlhf.models.vision import freeze_tower
from openrlhf.utils.callbacks import Callback
from openrlhf.utils.console import notice, warn
from openrlhf.utils.gpus import peak_memory_gib
from openrlhf.utils.images import ImageProcessor
from openrlhf.utils.metrics import Metrics, Values, merged, standard_errors
from openrlhf.utils.outcome import noteworthy, num_since_best, stopped_early
from openrlhf.utils.packing import Batch
from openrlhf.utils.progress import progress
from openrlhf.utils.step_line import RunClock, eval_line, hints, needed_history, step_line
from openrlhf.utils.threads import load_per_core
from openrlhf.utils.tokenizer import Tokenizer, load_tokenizer
from openrlhf.utils.tracker import NullTracker, Tracker

PHASES = ("data", "forward_backward", "optimizer")  # of a step, in their order
MAX_NAMED_ROWS = 3
MIN_PARTS = 8  # of an evaluation: its standard errors come from their differences

SampleT = TypeVar("SampleT")
SampleT_co = TypeVar("SampleT_co", covariant=True)
BatchT = TypeVar("BatchT", bound=Batch)


class SampleSet(Protocol[SampleT_co]):
    """Samples by index, with the number of tokens and the location of each."""

    @property
    def lengths(self) -> Tensor:
        """Return the tokens of every sample, (len,) int64."""

    @property
    def costs(self) -> Tensor:
        """Return the work of every sample in tokens, (len,) int64."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> SampleT_co: ...

    def location(self, index: int) -> str:
        """Return the file and row of a sample: `rows.jsonl: row 3`."""


# What a batch is read from, by row: a set, or the samples of the batch alone.
Samples: TypeAlias = SampleSet[SampleT] | Mapping[int, SampleT] | Sequence[SampleT]
Lengths: TypeAlias = Mapping[int, int] | Sequence[int]


@dataclass(frozen=True)
class Inputs:
    """Everything that is read and checked before a model is loaded.

    Example: `Inputs("Qwen/Qwen2.5-0.5B", tokenizer, samples, eval_samples)`
    """

    model_path: str
    tokenizer: Tokenizer
    samples: SampleSet[Any]
    eval_samples: SampleSet[Any] | None = None
    image_processor: ImageProcessor | None = None  # of a model that reads pictures

    @property
    def data(self) -> DataIdentity:
        """Return the data that a run resumes on only."""
        return DataIdentity(self.samples.fingerprint, len(self.samples))


def num_updates(config: SupervisedConfig, num_samples: int) -> int:
    """Return the optimizer steps of a run; the last batch of an epoch may be smaller."""
    return config.train.max_epochs * -(-num_samples // config.train.batch_size)


class BaseTrainer(ABC, Generic[SampleT, BatchT]):
    """Trains one model on samples; a recipe gives samples, model and loss."""

    name: ClassVar[str]  # name of the command
    reads_pictures: ClassVar[bool] = False
    data_set: ClassVar[type[TokenizedDataset]]  # that makes samples of rows
    scores: ClassVar[bool] = False  # True of a model with a scalar head
    # Metrics by which evaluations may be compared: the first, unless --save_best names another.
    judged_by: ClassVar[tuple[str, ...]] = ("loss",)

    def __init__(self, config: Any, inputs: Inputs, strategy: DeepSpeedStrategy) -> None:
        self.config, self.inputs, self.strategy = config, inputs, strategy
        self.samples: Samples[SampleT] = inputs.samples
        self.eval_samples: SampleSet[SampleT] | None = inputs.eval_samples
        self.batch_size: int = config.train.batch_size  # of an optimizer step, all ranks
        self.micro_batch_size: int = config.train.micro_batch_size
        budget = config.train.token_budget  # tokens of a micro-batch, instead of samples
        self.max_tokens: int | None = budget and budget * config.ds.ring_attn_size
        self.num_updates = num_updates(config, len(inputs.samples))
        self.model: Any = self.load_model(config, inputs.model_path)
        if config.model.gradient_checkpointing_enable:
            self.model.gradient_checkpointing_enable(config.model.gradient_checkpointing_reentrant)
        self.engine = strategy.prepare_train(self.model, config, num_updates=self.num_updates)
        self.tracker: Tracker = NullTracker()
        self.callbacks: Sequence[Callback] = ()
        # Called after the best evaluation so far; returns True if its model is kept.
        self.keep_best: Callable[[], bool] | None = None
        self.best: dict[str, Any] | None = None  # the evaluation whose model is kept
        self.global_step = 0
        self.is_ended = False  # True once a callback, or --early_stop, has asked for it
        self.pending = Metrics()  # of the steps since the last line that was logged
        self.history: list[Values] = []  # of the logged steps, as far as hints look
        self.clock = RunClock(0)
        self._lengths: Lengths = inputs.samples.lengths.tolist()
        self._costs: Lengths = inputs.samples.costs.tolist()

    @classmethod
    def check(cls, config: Any, tokenizer: Tokenizer) -> None:
        """Raise ConfigError for what only the tokenizer and the files can tell."""

    @classmethod
    def best_metric(cls, config: SupervisedConfig) -> str:
        """Return the metric by which evaluations are compared; raise ConfigError for an unknown
        one.
        """
        key = config.ckpt.best_metric_key.removeprefix("eval/")
        if key in ("auto", "none", "first"):
            return f"eval/{cls.judged_by[0]}"
        if key not in cls.judged_by:
            raise ConfigError(
                f"--save_best {key} is no metric by which evaluations are compared. Type one of "
                f"{', '.join(cls.judged_by)}, or none."
            )
        return f"eval/{key}"

    @classmethod
    def other_models(cls, config: Any) -> Mapping[str, bool]:
        """Return the other models that read every sample, each with True if its weights are kept in
        CPU memory.
        """
        return {}

    @classmethod
    def notices(cls, config: Any) -> list[str]:
        """Return lines about the models that a person should read."""
        return []

    @classmethod
    def row_format(cls, config: Any) -> dict[str, Any]:
        """Return fields of the data set's RowFormat that are no settings of `data.*`."""
        return {}

    @classmethod
    def load_model(cls, config: Any, model_path: str) -> nn.Module:
        """Load the module to train."""
        return load_actor(config, model_path)

    def export(self, path: Path) -> None:
        """Write the trained model at `path` in Hugging Face format; all ranks call."""
        model = hf_model_of(self.model)
        tensors = master_parameters(model) if self.config.model.export_fp32 else None
        export_hf(model, self.inputs.tokenizer, path, tensors=tensors)

    @abstractmethod
    def counts(self, batch: BatchT) -> dict[str, float]:
        """Return the share of a batch in each denominator of the loss: `{"num_tokens": 17}`."""

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

    def prepare(self, rows: Sequence[int], samples: Samples[SampleT]) -> dict[str, float]:
        """Return numbers that need a whole batch before its loss; they join the denominators. All
        ranks call, with the same rows.
        """
        return {}

    def summarise(self, values: dict[str, float]) -> dict[str, float]:
        """Return further numbers of an evaluation, from its reduced metrics."""
        return {}

    def add_router_loss(
        self, loss_sum: Tensor, aux_loss_S: Tensor | None, weights_S: Tensor, metrics: Metrics
    ) -> Tensor:
        """Return the sum of the losses with the router losses of S sequences added, each as many
        times as its weight says.
        """
        coef = self.config.model.aux_loss_coef
        if not coef or aux_loss_S is None:
            return loss_sum
        aux_sum, total = (aux_loss_S * weights_S).sum(), weights_S.sum().item()
        metrics.add("aux_loss", aux_sum.double() / total, weight=total)
        return loss_sum + coef * aux_sum

    @property
    def is_finished(self) -> bool:
        """Return True once every epoch is done, or the ranks have agreed to end."""
        return self.is_ended or self.global_step >= self.num_updates

    @property
    def position(self) -> tuple[int, int]:
        """Return the epoch, and the batches of it that are done; both follow from the step."""
        return divmod(self.global_step, -(-len(self.inputs.samples) // self.batch_size))

    def end(self) -> None:
        """End the run after this step, as after its last: it is evaluated, saved and exported. A
        callback may call this on any rank.
        """
        self.is_ended = True

    def fit(self, *, after_step: Callable[[], None] | None = None) -> None:
        """Train from where the run stands to its end; `after_step` is called when all of a step is
        done, its log line and evaluation too.
        """
        self.clock = RunClock(self.global_step)
        self._end_if_stalled()
        with progress("training", self.num_updates) as advance:
            for rows in () if self.is_ended else self.batches_left():
                metrics = self.train_step(rows)
                self.pending.merge(metrics)
                self.global_step += 1
                if self.is_due(self.config.logger.logging_steps):
                    self._log()
                values = self._reduced(metrics) if self.callbacks else {}
                for callback in self.callbacks:
                    callback.on_step_end(self, self.global_step, values)
                self._agree_on_end()
                self._evaluate_if_due()
                self._agree_on_end()
                if after_step is not None:
                    after_step()
                advance(completed=self.global_step)
                self._agree_on_end()
                if self.is_ended:
                    break
        if self.pending.cells:
            self._log()
        self.tracker.close()

    def _agree_on_end(self) -> None:
        """End the run on all ranks if a callback has ended it on one."""
        if self.callbacks:
            self.is_ended = any(all_gather_object(self.is_ended))

    def _end_if_stalled(self) -> None:
        """End the run if as many evaluations as --early_stop says were not better than the best;
        all ranks call.
        """
        if self.config.eval.early_stop and on_main(self._is_stalled):
            self.end()

    def _is_stalled(self) -> bool:
        records, name = self.tracker.records(), self.best_metric(self.config)
        is_stalled = num_since_best(records, name) >= self.config.eval.early_stop
        if is_stalled:
            notice(stopped_early(records, name))
        return is_stalled

    def batches_left(self) -> Iterator[list[int]]:
        """Yield the rows of every global batch from where the run stands to its end; the same on
        every rank.
        """
        num_rows, seed = len(self.inputs.samples), self.config.train.seed
        first, num_done = self.position
        for epoch in range(first, self.config.train.max_epochs):
            for batch in epoch_order(num_rows, seed, epoch).split(self.batch_size)[num_done:]:
                yield batch.tolist()
            num_done = 0

    def eval_batches(self, num_samples: int) -> list[list[int]]:
        """Return the rows of every batch of an evaluation: of a step's size, in file order."""
        return fixed_batches(num_samples, self.batch_size)

    def train_step(self, rows: Sequence[int]) -> Metrics:
        """Do one optimizer step over a global batch; return this rank's metrics."""
        times = [time.monotonic()]
        self.engine.module.train()
        parts = list(self.own_batches(self.samples, rows, self._costs))
        denominators: dict[str, float] = {}
        for part, batch in parts:
            for name, number in self.counts(batch).items():
                denominators[name] = denominators.get(name, 0.0) + number * bool(part)
        denominators = self.strategy.all_reduce_sum(denominators)
        times.append(time.monotonic())
        denominators |= self.prepare(rows, self.samples)
        metrics = Metrics()
        count = len(parts)
        with progress(f"step {self.global_step + 1}", count, is_shown=count > 1) as advance:
            for index, (part, batch) in enumerate(parts):
                loss = self._loss_of(part, batch, denominators, metrics)
                self.engine.backward(loss, is_last_micro_batch=index == count - 1)
                advance()
        metrics.read()  # the device's time belongs to this phase
        times.append(time.monotonic())
        if not self._step(rows, metrics):
            skipped = Metrics()
            skipped.add(SKIPPED, float(self.strategy.is_main), reduction="sum")
            return skipped
        times.append(time.monotonic())
        for name, (begin, end) in zip(PHASES, pairwise(times), strict=True):
            metrics.add(f"timing/{name}", end - begin)
        seconds = times[-1] - times[0]
        metrics.add("timing/step_total", seconds)
        metrics.add("load_per_core", load_per_core(), reduction="max")
        metrics.add("memory/peak_gib", peak_memory_gib(self.engine.device), reduction="max")
        num_tokens = sum(self._lengths[row] for row in rows)
        metrics.add("tokens_per_s", num_tokens / seconds, weight=seconds)
        return metrics

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return metrics over the whole evaluation set, all ranks together."""
        assert self.eval_samples is not None, "there is no evaluation set"
        self.engine.module.eval()
        lengths, parts = self.eval_samples.costs.tolist(), []
        with progress("evaluating", len(lengths), is_shown=self.strategy.is_main) as advance:
            batches = self.eval_batches(len(lengths))
            count = math.ceil(MIN_PARTS / (len(batches) * self.strategy.topology.dp_size))
            for rows in batches:
                numbers = self.prepare(rows, self.eval_samples)
                own = self.own_batches(self.eval_samples, rows, lengths, min_count=count)
                for part, batch in own:
                    parts.append(Metrics())
                    self._loss_of(part, batch, self.counts(batch) | numbers, parts[-1])
                advance(len(rows))
        gathered = all_gather_object(parts, group=self.strategy.dp_group)
        parts = [part for own in gathered for part in own]
        values = merged(parts).values()
        values |= self.summarise(values) | standard_errors(parts)
        return {f"eval/{name}": value for name, value in values.items()}

    def own_batches(
        self,
        samples: Samples[SampleT],
        rows: Sequence[int],
        lengths: Lengths,
        *,
        min_count: int = 1,
    ) -> Iterator[tuple[list[int], BatchT]]:
        """Yield this rank's micro-batches of rows, with the rows in them: `min_count` or more where
        there are as many rows. Tokens are balanced over the ranks. Every rank has as many as the
        busiest: one without rows holds the shortest sample, and its results do not count.
        """
        own_lengths = [lengths[row] for row in rows]
        topology = self.strategy.topology
        plans = [
            [
                [part[index] for index in cut]
                for cut in self._cut([own_lengths[index] for index in part], min_count)
            ]
            for part in balanced_partitions(own_lengths, topology.dp_size)
        ]
        own, count = plans[topology.dp_rank], max(len(plan) for plan in plans)
        spare = min(rows, key=lambda row: lengths[row])
        for indices in own + [[]] * (count - len(own)):
            part = [rows[index] for index in indices]
            yield part, self.collate([samples[row] for row in part or [spare]])

    def _cut(self, lengths: Sequence[int], min_count: int) -> list[list[int]]:
        """Return the micro-batches of a rank's samples, as indices into them."""
        if self.max_tokens is None:
            size = max(len(lengths) // min_count, 1)
            return fixed_batches(len(lengths), min(self.micro_batch_size, size))
        budget = max(sum(lengths) // min_count, *lengths, 1)
        return token_budget_batches(lengths, min(self.max_tokens, budget))

    def _loss_of(
        self,
        rows: Sequence[int],
        batch: BatchT,
        denominators: Mapping[str, float],
        metrics: Metrics,
    ) -> Tensor:
        """Return the loss of a micro-batch; one without rows still runs, for its collectives."""
        if not rows:
            denominators = dict.fromkeys(denominators, 1.0)
        loss, own = self.compute_loss(batch.to(self.engine.device), denominators)
        if not rows:
            return loss * 0.0
        metrics.merge(own)
        return loss

    def _step(self, rows: Sequence[int], metrics: Metrics) -> bool:
        """Update the weights; return False if that was skipped."""
        try:
            metrics.add("grad_norm", self.engine.step())
        except NumericsError as error:
            if self.strategy.is_main:
                found = ", ".join(
                    self.inputs.samples.location(row) for row in rows[:MAX_NAMED_ROWS]
                )
                warn(
                    f"step {self.global_step + 1} was skipped: its gradient is not finite "
                    f"({len(rows)} rows, such as {found})."
                )
            if not isinstance(error, SkippedUpdate):
                raise
            return False
        metrics.add("lr", self.engine.lr, reduction="max")
        metrics.add("update_ratio", self.engine.update_ratio)
        return True

    def is_due(self, interval: int) -> bool:
        """Return True if what is done every `interval` steps, and after the last, is due."""
        return self.global_step % interval == 0 or self.is_finished

    def _evaluate_if_due(self) -> None:
        every, (_, num_done) = self.config.eval.steps, self.position
        is_due = self.is_due(every) if every >= 1 else num_done == 0 or self.is_finished
        if self.eval_samples is None or not is_due:
            return
        values = self.evaluate()
        if self.strategy.is_main:
            notice(eval_line(self.global_step, values))
            self.tracker.log(self.global_step, values)
        for callback in self.callbacks:
            callback.on_evaluate(self, self.global_step, values)
        if self.keep_best is not None:
            self._keep_if_best(values, self.keep_best)
        self._end_if_stalled()

    def _keep_if_best(self, values: Mapping[str, float], keep: Callable[[], bool]) -> None:
        """Keep the model of an evaluation that is finite, and better than that of the model that is
        kept, if that was of the same rows; all ranks call, with the same values.
        """
        assert self.inputs.eval_samples is not None, "there is no evaluation set"
        name, data = self.best_metric(self.config), self.inputs.eval_samples.fingerprint
        found = {"step": self.global_step, "data": data, name: values.get(name, math.nan)}
        before = [self.best] if self.best and self.best["data"] == data else []
        is_best = math.isfinite(found[name]) and noteworthy([*before, found], name)[1] is found
        if is_best and keep():
            self.best = found

    def _log(self) -> None:
        values = self._reduced(self.pending)
        self.pending = Metrics()
        if self.strategy.is_main and values:
            notice(step_line(self.global_step, self.num_updates, values, self.clock))
            self.tracker.log(self.global_step, values)
            for line in hints(values, self.history):
                notice(line)
            self.history = needed_history([*self.history, values])

    def _reduced(self, metrics: Metrics) -> dict[str, float]:
        """Return the metrics of all ranks as numbers."""
        return merged(all_gather_object(metrics, group=self.strategy.dp_group)).values()


def add_means(metrics: Metrics, values: Mapping[str, Tensor]) -> None:
    """Note the mean of each tensor, (N,); nothing of an empty one."""
    for name, values_N in values.items():
        if len(values_N):
            metrics.add(name, values_N.detach().float().mean(), weight=len(values_N))


def check_same_tokens(own: Tokenizer, path: str, flag: str, *, remote_code: bool) -> None:
    """Raise ConfigError unless the model at `path`, named by `flag`, has the tokens of `own`."""
    tokens = own.get_vocab()
    others = load_tokenizer(path, trust_remote_code=remote_code).get_vocab()
    for token in sorted(tokens.keys() | others.keys()):
        if others.get(token) != tokens.get(token):
            raise ConfigError(
                f"{flag} {path} and --pretrain differ in vocabulary: token {token!r} is "
                f"{others.get(token, 'nothing')} there, {tokens.get(token, 'nothing')} here. "
                f"Choose a {flag} of the same family, with the same vocabulary."
            )


def load_actor(config: SupervisedConfig, model_path: str, *, has_dropout: bool = True) -> Actor:
    """Load the policy to train, with an adapter when asked for.

    Without dropout the model computes the same in training and evaluation, as losses against a
    reference need it; an adapter's own dropout stays.
    """
    model = load_causal_lm(model_path, config)
    if not has_dropout:
        disable_dropout(model)
    if config.model.freeze_visual_encoder:
        freeze_tower(model)
    with_aux_loss = config.model.aux_loss_coef > 0
    return Actor(add_lora(model, config.ds.lora), with_aux_loss=with_aux_loss)
