"""The workers of a run: what every rank of every model shares, and the updates and checkpoints of
those that are trained.

Workers are plain classes. RankActor of ray/launcher.py holds one; a WorkerGroup calls it directly.
All ranks run the same number of micro-batches; a rank with fewer runs empty ones, because forward,
backward and step are collectives under ZeRO. What goes wrong with files on one rank is raised on
all of them, so that none waits for another.
"""

import json
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.algorithms.balancing import fixed_batches, token_budget_batches
from openrlhf.algorithms.policy_loss import aggregate
from openrlhf.config.generation import GenerationRunConfig
from openrlhf.config.ppo import ActorConfig, CriticConfig, PPOConfig
from openrlhf.distributed.checkpoints import random_state, set_random_state
from openrlhf.distributed.collectives import all_gather_object, all_or_none, problem_of, world_size
from openrlhf.distributed.export import export_hf
from openrlhf.distributed.folders import Write, free_memory, nothing, write_json
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import SKIPPED, EvalEngine, TrainEngine
from openrlhf.errors import CheckpointError, NumericsError, SkippedUpdate
from openrlhf.models.actor import Actor
from openrlhf.models.loading import policy_processor
from openrlhf.models.support import check_here
from openrlhf.models.value_head import CriticModel
from openrlhf.trainer.ppo_utils.experience import SampleShare, opened
from openrlhf.trainer.ppo_utils.samples import Samples, scatter_back
from openrlhf.trainer.ppo_utils.update_plan import Skip, UpdateResult, UpdateStep
from openrlhf.utils.framework_logs import redirect_framework_logs
from openrlhf.utils.gpus import peak_memory_gib
from openrlhf.utils.images import ImageProcessor
from openrlhf.utils.memory import pass_over_old_objects
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.progress import Advance, Health, progress
from openrlhf.utils.rendezvous import free_port
from openrlhf.utils.tensors import NamedTensors
from openrlhf.utils.threads import errors_to
from openrlhf.utils.tokenizer import tokenizer_of


class ModelWorker:
    """One rank of a model's group; subclasses add the model."""

    strategy: DeepSpeedStrategy
    engine: TrainEngine | EvalEngine
    has_own_process = False
    address = "127.0.0.1"  # of this machine, as the other ranks reach it
    work: str | None = None  # the loop over micro-batches that runs now
    done_of: tuple[int, int | None] = (0, None)  # micro-batches of this loop: done, and in all

    def __init__(
        self,
        config: GenerationRunConfig,
        role: str,
        run_dir: str,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.config, self.role, self.run_dir = config, role, run_dir
        self.rank, self.num_ranks = rank, num_ranks

    def run(self, method: str, *args: object) -> Any:
        """Call a method for the controller, with the samples of a share in its place, and return a
        tensor of the CPU as an array, which Ray moves in a sixth of the time. Then give cached
        device memory back: torch keeps freed memory for its own process, and other roles and
        engines on this device need it.
        """
        own = [opened(arg) if isinstance(arg, SampleShare) else arg for arg in args]
        result = getattr(self, method)(*own)
        torch.cuda.empty_cache()
        return result.numpy() if isinstance(result, Tensor) else result

    def endpoint(self) -> tuple[str, int]:
        """Return the address of this machine and a free port."""
        return self.address, free_port()

    def join(self, host: str, port: int, *, local_rank: int) -> None:
        """Set up this process as its rank of the group; every rank must call it."""
        self.has_own_process = True
        redirect_framework_logs(self.run_dir, f"{self.role}-{self.rank}", capture_streams=True)
        os.environ.update(
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
            RANK=str(self.rank),
            WORLD_SIZE=str(self.num_ranks),
            LOCAL_RANK=str(local_rank),
        )
        self.setup()

    def setup(self) -> None:
        """Start the distributed runtime in a process that already knows its rank."""
        self.strategy = DeepSpeedStrategy.of(self.config)
        self.strategy.setup()
        check_here(self.config.ds, is_cuda=self.strategy.device.type == "cuda")

    @cached_property
    def image_processor(self) -> ImageProcessor | None:
        """Return the image processor of a policy that sees images, else None."""
        return policy_processor(self.config)

    def init_model(self, *args: Any) -> int:
        """Load the model of the role; return its parameter count."""
        raise NotImplementedError

    def health(self) -> Health:
        """Return the progress of this rank; may be called while it works."""
        return Health(self.work, *self.done_of, os.getpid())

    @contextmanager
    def working(self, what: str, total: int | None = None) -> Iterator[Advance]:
        """Announce a loop over micro-batches, with a bar; yield the function that counts them."""
        self.work, self.done_of = what, (0, total)
        with progress(what, total) as show:

            def advance(num_done: int = 1, total: int | None = None) -> None:
                self.done_of = (self.done_of[0] + num_done, total or self.done_of[1])
                show(completed=self.done_of[0], total=self.done_of[1])

            try:
                yield advance
            finally:
                self.work = None

    def micro_batches(
        self, costs: Sequence[int], micro_batch_size: int, budget: int | None
    ) -> list[list[int]]:
        """Return the indices of each micro-batch, of at most `budget` tokens a rank if there is
        one.
        """
        if budget is None or not costs:
            return fixed_batches(len(costs), micro_batch_size)
        return token_budget_batches(costs, budget * self.config.ds.ring_attn_size)

    @torch.no_grad()
    def forward_in_micro_batches(
        self, samples: Samples, forward: Callable[[PackedBatch], Tensor], *, what: str
    ) -> Tensor:
        """Run `forward` over a share and lay the results end to end in its order, on the CPU;
        `what` names them on a bar.
        """
        size, budget = self.config.rollout.micro_batch_size, self.config.scoring_budget
        parts = self.micro_batches(samples.costs.tolist(), size, budget)
        count = max(all_gather_object(len(parts)))
        outputs = []
        with self.working(what, count) as advance:
            for k in range(count):
                batch = samples.select(parts[k]) if k < len(parts) else samples.stand_in()
                row = batch.packed(self.image_processor).to(self.engine.device)
                outputs.append(forward(row).cpu().numpy())
                advance()
        if not parts:
            return torch.zeros(0)
        return scatter_back(outputs[: len(parts)], parts, samples.num_actions)


class TrainedWorker(ModelWorker):
    """One rank of a model with an optimizer; subclasses add the model and its loss."""

    config: PPOConfig
    engine: TrainEngine
    model: Actor | CriticModel
    title: str  # of the model on a bar
    prefix: str  # of the metrics "lr" and "grad_norm"
    weight_version = 0  # steps in which the policy was trained
    notes: "UpdateNotes"  # of the last `fit`
    taken: Sequence[Write] | None = None  # for a checkpoint, and not yet written

    def prepare(
        self, model: Actor | CriticModel, section: ActorConfig | CriticConfig, num_updates: int
    ) -> int:
        """Shard the model for `num_updates` optimizer steps; return its parameter count."""
        if section.gradient_checkpointing_enable:
            model.gradient_checkpointing_enable(section.gradient_checkpointing_reentrant)
        num_parameters = sum(p.numel() for p in model.parameters())
        self.model, self.notes = model, UpdateNotes(())
        self.engine = self.strategy.prepare_train(model, section, num_updates=num_updates)
        if self.has_own_process:
            pass_over_old_objects()
        return num_parameters

    def offload_states(self) -> None:
        """Move training states to CPU memory."""
        with self.working(f"moving states of the {self.title} off the device"):
            self.engine.offload_states()

    def reload_states(self) -> None:
        """Bring training states back."""
        with self.working(f"moving states of the {self.title} to the device"):
            self.engine.reload_states()

    def fit(
        self, steps: Sequence[UpdateStep], columns: Sequence[str] = (), num_done: int = 0
    ) -> UpdateResult:
        """Make optimizer steps of a rollout batch on this rank's shares, until one is skipped;
        return this rank's metrics and the columns of the loss that are asked for. `num_done` steps
        of the batch came before: if the last call ended at a skipped one, what came of that call is
        in the result, too.
        """
        if num_done and self.notes.skip is not None:
            self.notes.pass_skip()
        else:
            self.notes = UpdateNotes(columns, num_done)
        notes, metrics = self.notes, self.notes.metrics
        self.engine.module.train()  # gradient checkpointing works in training mode only
        num_cut = 0
        with self.working(f"updating the {self.title}") as advance:
            for step_index, step in enumerate(steps):
                parts = self._cut(step)
                advance(0, num_cut + (len(steps) - step_index) * len(parts))
                num_cut += len(parts)
                for index, (loss_of, indices) in enumerate(parts):
                    loss = loss_of(step, indices, notes)
                    self.engine.backward(loss, is_last_micro_batch=index == len(parts) - 1)
                    advance()
                if why := self._step(notes):
                    notes.skip = Skip(notes.num_updates, len(steps) - step_index - 1, why)
                    break
                notes.num_updates += 1
                metrics.add(f"{self.prefix}_lr", self.engine.lr, reduction="max")
        self.engine.module.eval()
        memory_gib = peak_memory_gib(self.engine.device)
        metrics.add(f"memory/{self.prefix}_gib", memory_gib, reduction="max")
        return notes.result()

    def updates_done(self) -> int:
        """Return the optimizer steps of the last rollout batch that were made, or skipped before
        another one.
        """
        return self.notes.num_updates

    def _step(self, notes: "UpdateNotes") -> str:
        """Make an optimizer step, or skip it on all ranks and return the reason, which is what any
        rank found wrong with its loss; raise it if too many were skipped.
        """
        failure: NumericsError | None = None
        try:
            grad_norm = self.engine.step()
        except NumericsError as error:
            grad_norm, failure = math.nan, error
        if math.isfinite(grad_norm):
            notes.keep_update()
            notes.metrics.add(f"{self.prefix}_grad_norm", grad_norm)
            notes.metrics.add(f"{self.prefix}_update_ratio", self.engine.update_ratio)
            self.after_step()
            return ""
        notes.metrics.add(SKIPPED, float(self.rank == 0), reduction="sum")
        problems = [problem for problem in all_gather_object(notes.problem()) if problem]
        if failure is not None and not isinstance(failure, SkippedUpdate):
            raise NumericsError("; ".join([*problems[:1], str(failure)]))
        if not problems and failure is None:  # the loss scale of fp16 is looked for
            notes.keep_update()
        return [*problems, str(failure or "")][0]

    def _cut(self, step: UpdateStep) -> list[tuple[Callable[..., Tensor], list[int]]]:
        """Return the loss of each micro-batch and the indices of its samples or texts: as many on
        every rank, with no indices where a rank has fewer than another.
        """
        size, budget = self.config.train.micro_batch_size, self.config.train.token_budget
        parts = self.micro_batches(step.samples.costs.tolist(), size, budget)
        texts = self.micro_batches([len(token_ids) for token_ids in step.texts], size, budget)
        # A step without samples still is an optimizer step.
        parts += [[]] * (max(1, *all_gather_object(len(parts))) - len(parts))
        texts += [[]] * (max(all_gather_object(len(texts))) - len(texts))
        return [(self._sample_loss, p) for p in parts] + [(self._text_loss, t) for t in texts]

    def _sample_loss(self, step: UpdateStep, indices: list[int], notes: "UpdateNotes") -> Tensor:
        own = step.samples.select(indices) if indices else step.samples.stand_in()
        samples = own.to(self.engine.device)
        noted = notes.of_update if indices else Metrics()
        row = samples.packed(self.image_processor).to(self.engine.device)
        loss, columns = self.compute_loss(row, samples, step, noted)
        if not indices:
            return loss * 0.0
        notes.add(own.sample_indices.tolist(), columns)
        groups = own.group_ids.unique().tolist()[:8]
        return notes.checked(loss, f"samples of groups {groups} (group_id in the files of samples)")

    def _text_loss(self, step: UpdateStep, indices: list[int], notes: "UpdateNotes") -> Tensor:
        texts = [step.texts[index] for index in indices] or [torch.zeros(2, dtype=torch.int64)]
        is_target = [torch.arange(len(token_ids)) > 0 for token_ids in texts]
        batch = PackedBatch.from_sequences(texts, is_target).to(self.engine.device)
        noted = notes.of_update if indices else Metrics()
        loss = self.compute_text_loss(batch, step.num_text_tokens, noted)
        return notes.checked(loss, "pre-training text") if indices else loss * 0.0

    def compute_loss(
        self, batch: PackedBatch, samples: Samples, step: UpdateStep, metrics: Metrics
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss () of a packed row, with the denominators of the step, and what it was
        made of, (N,), by name.
        """
        raise NotImplementedError

    def compute_text_loss(self, batch: PackedBatch, num_tokens: int, metrics: Metrics) -> Tensor:
        """Return the loss () of packed text; `num_tokens` are those of the step on all ranks."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Act on the weights after an optimizer step."""

    def aggregated(
        self, values_N: Tensor, samples: Samples, step: UpdateStep, mode: str | None = None
    ) -> Tensor:
        """Return the part of a micro-batch in the step's mean of per-token values, ()."""
        return aggregate(
            values_N,
            samples.num_actions,
            mode=mode or self.config.algo.loss_aggregation,
            num_tokens_global=step.num_tokens,
            num_seqs_global=step.num_samples,
            max_new_tokens=self.config.rollout.max_new_tokens,
        )

    def check_sees(self, path: str) -> None:
        """Raise CheckpointError if this rank does not see a path of the controller's."""
        if not Path(path).exists():
            raise CheckpointError(
                f"{path} is not seen by {self.role} rank {self.rank} on node "
                f"{self.address}. Type a --ckpt_path on a file system that all nodes share."
            )

    def save_states(self, folder: str, has_optimizer: bool = True) -> None:
        """Take states and write them; all ranks call, all or none raise CheckpointError."""
        writes = self._copies(folder, has_optimizer=has_optimizer)
        all_or_none(lambda: [write() for write in writes])

    def take_states(self, folder: str, free: Mapping[str, int]) -> dict[str, int]:
        """Copy weights, optimizer, schedule and random numbers, which `write_taken` writes into a
        checkpoint's folder; all ranks call, all or none raise CheckpointError. `free` has the free
        bytes of each node before any model was copied; return it with those of this node.
        """
        self.taken = None  # one copy at a time
        node = socket.gethostname()
        free_now = free_memory()  # before any rank of this model copies: `_copies` first meets all
        free = {node: free_now, **free}
        self.taken = self._copies(folder, free_at_start=free[node], free_now=free_now)
        return free

    def _copies(self, folder: str, **options: Any) -> Sequence[Write]:
        """Copy the states with the options of the engine's `take_states`; return the functions that
        write them.
        """
        # A run that is stopped is saved without --save_steps too, and was not checked at its start.
        all_or_none(lambda: self.check_sees(folder))
        own = Path(folder) / self.role
        take = partial(self.engine.take_states, own, **options)
        return all_or_none(lambda: [take(), self.take_own(Path(folder))])

    def write_taken(self) -> str:
        """Write what was taken last; return what went wrong, if anything. Another thread than
        the one that trains calls.
        """
        writes, self.taken = self.taken, None
        if writes is None:
            return f"{self.role} rank {self.rank} holds no copy of its states."
        problems: list[str] = []
        with errors_to(lambda error: problems.append(problem_of(error))):
            for write in writes:
                write()
        return "".join(problems)

    def num_state_bytes(self, has_optimizer: bool = True) -> int:
        """Return the bytes of the states of all ranks."""
        return self.engine.num_state_bytes(has_optimizer=has_optimizer)

    def load_states(self, folder: str) -> bool:
        """Load what `take_states` took; return True if random numbers go on where they stood,
        which they cannot on another number of ranks.
        """
        has_own_rate = self.config.ckpt.reset_lr
        self.engine.load_states(Path(folder) / self.role, has_own_rate=has_own_rate)
        return all_or_none(lambda: self.load_own(Path(folder)))

    def take_own(self, folder: Path) -> Write:
        """Write random numbers and weight version as JSON; return the function that writes what a
        subclass adds.
        """
        state = {"random": random_state(), "world_size": world_size()}
        state["num_threads"] = torch.get_num_threads()
        file = self._own_file(folder, self.rank)
        write_json(file, state | {"weight_version": self.weight_version})
        return nothing

    def load_own(self, folder: Path) -> bool:
        """Load what `take_own` wrote; return True if the number of ranks is the same. With another
        number the weight version comes from the file of rank 0, and random numbers start anew.
        """
        state = json.loads(self._own_file(folder, 0).read_text())
        self.weight_version = state["weight_version"]
        has_same_ranks = bool(state["world_size"] == world_size())
        if has_same_ranks:
            own = json.loads(self._own_file(folder, self.rank).read_text())
            set_random_state(own["random"])
        return has_same_ranks

    def _own_file(self, folder: Path, rank: int) -> Path:
        return folder / f"{self.role}_rank{rank}.json"

    def export(self, path: str, tensors: NamedTensors | None = None) -> None:
        """Export the model in Hugging Face format; all ranks take part, rank 0 writes. Raise
        CheckpointError on all ranks or none. `tensors` are other weights of the same names.
        """
        tokenizer, model = tokenizer_of(self.config, self.config.policy_path), self.model.model
        all_or_none(lambda: export_hf(model, tokenizer, Path(path), tensors=tensors))


class UpdateNotes:
    """Collects the metrics of a rank's optimizer steps, and columns of the loss: for each sample
    those of its first epoch.
    """

    def __init__(self, names: Sequence[str], num_updates: int = 0) -> None:
        self.metrics = Metrics()  # of the updates that were made
        self.of_update = Metrics()  # of the update under way
        self.num_updates = num_updates  # of the rollout batch so far
        self.skip: Skip | None = None
        self.losses: list[tuple[Tensor, str]] = []  # of the step, and of what
        self.parts: dict[str, list[Tensor]] = {name: [] for name in names}
        self.indices: dict[int, None] = {}  # of samples, in the order in which they were seen

    def add(self, indices: Sequence[int], columns: Mapping[str, Tensor]) -> None:
        """Keep the columns that are asked for of these samples, unless an earlier epoch has."""
        if indices[0] not in self.indices:
            self.indices |= dict.fromkeys(indices)
            for name, parts in self.parts.items():
                parts.append(columns[name].detach().float())

    def keep_update(self) -> None:
        """Keep the metrics of the update under way: it was made."""
        self.metrics.merge(self.of_update)
        self._forget_update()

    def pass_skip(self) -> None:
        """Go on after the update that was skipped, without its metrics."""
        self.num_updates, self.skip = self.num_updates + 1, None
        self._forget_update()

    def _forget_update(self) -> None:
        self.of_update = Metrics()
        self.losses.clear()

    def checked(self, loss: Tensor, what: str) -> Tensor:
        """Return the loss, or NaN if it is not finite: then the gradient of the step is not finite
        on any rank, and all ranks skip the update.
        """
        self.losses.append((loss.detach(), what))
        return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)

    def problem(self) -> str | None:
        """Return the words for the first loss of the step that is not finite."""
        for loss, what in self.losses:
            if not math.isfinite(loss.item()):
                return f"the loss is {loss.item()} for {what}"
        return None

    def result(self) -> UpdateResult:
        """Return everything on the CPU."""
        kept = {name: torch.cat(parts) for name, parts in self.parts.items() if parts}
        columns = {name: column.cpu().numpy() for name, column in kept.items()}
        return UpdateResult(self.metrics, tuple(self.indices), columns, self.skip)
