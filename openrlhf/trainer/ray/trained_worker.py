"""A rank of a model that is trained: the updates that actor and critic share, its part of a
checkpoint, exports on the way.

All ranks run the same number of micro-batches; a rank with fewer runs empty ones, because forward,
backward and step are collectives under ZeRO. What goes wrong with files on one rank is raised on
all of them, so that none waits for another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.algorithms.policy_loss import aggregate
from openrlhf.config.ppo import ActorConfig, CriticConfig
from openrlhf.distributed.checkpoints import random_state, set_random_state
from openrlhf.distributed.collectives import together, world_size
from openrlhf.distributed.export import NamedTensors, export_hf
from openrlhf.distributed.manifest import write_json
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.errors import NumericsError
from openrlhf.models.actor import Actor
from openrlhf.models.value_head import CriticModel
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.pretrain_text import pack_texts
from openrlhf.trainer.ppo_utils.replay_buffer import UpdateStep
from openrlhf.trainer.ppo_utils.vocabulary import load_policy_tokenizer
from openrlhf.trainer.ray.model_actor import ModelWorker, frees_cache
from openrlhf.trainer.ray.utils import node_address
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch


class TrainedWorker(ModelWorker):
    """One rank of a model with an optimizer; subclasses add the model and its loss."""

    engine: TrainEngine
    model: Actor | CriticModel
    title: str  # of the model on a bar
    prefix: str  # of the metrics "lr" and "grad_norm"

    def prepare(
        self, model: Actor | CriticModel, section: ActorConfig | CriticConfig, num_updates: int
    ) -> int:
        """Shard the model for `num_updates` optimizer steps; return its parameter count."""
        if section.gradient_checkpointing_enable:
            model.gradient_checkpointing_enable(section.gradient_checkpointing_reentrant)
        num_parameters = sum(p.numel() for p in model.parameters())
        self.model = model
        self.engine = self.strategy.prepare_train(model, section, num_updates=num_updates)
        return num_parameters

    @frees_cache
    def fit(self, steps: Sequence[UpdateStep]) -> Metrics:
        """Make all optimizer steps of one rollout batch on this rank's shares; return this rank's
        metrics.
        """
        metrics = Metrics()
        self.engine.train()  # gradient checkpointing works in training mode only
        num_done = 0
        with self.working(f"updating the {self.title}") as advance:
            for place, step in enumerate(steps):
                samples, texts = self._micro_batches(step)
                total = len(samples) + len(texts)
                advance(0, num_done + (len(steps) - place) * total)
                num_done += total
                for index, part in enumerate([*samples, *texts]):
                    loss_of = self._sample_loss if index < len(samples) else self._text_loss
                    loss = loss_of(step, part, metrics)
                    self.engine.backward(loss, is_last_micro_batch=index == total - 1)
                    advance()
                metrics.add(f"{self.prefix}_grad_norm", self.engine.step())
                self.after_step()
                metrics.add(f"{self.prefix}_lr", self.engine.lr, reduction="max")
        self.engine.eval()
        return metrics

    def _micro_batches(self, step: UpdateStep) -> tuple[list[list[int]], list[list[int]]]:
        """Return the indices of samples and of texts of each micro-batch, as many on every rank;
        none where a rank has fewer than another.
        """
        texts = () if step.texts is None else step.texts.token_ids
        samples = self.train_plan.cut(step.experience.seq_lengths.tolist())
        of_texts = self.train_plan.cut([len(token_ids) for token_ids in texts])
        # A step without samples still is an optimizer step.
        sizes = {"samples": float(max(len(samples), 1)), "texts": float(len(of_texts))}
        counts = self.strategy.all_reduce_max(sizes)
        samples += [[]] * (int(counts["samples"]) - len(samples))
        of_texts += [[]] * (int(counts["texts"]) - len(of_texts))
        return samples, of_texts

    def _sample_loss(self, step: UpdateStep, indices: list[int], metrics: Metrics) -> Tensor:
        if not indices:
            experience = step.experience.stand_in().to(self.engine.device)
            return self.compute_loss(experience.packed(), experience, step, Metrics()) * 0.0
        experience = step.experience.select(indices).to(self.engine.device)
        loss = self.compute_loss(experience.packed(), experience, step, metrics)
        _check_finite(loss, f"samples of groups {experience.group_ids.tolist()[:8]}")
        return loss

    def _text_loss(self, step: UpdateStep, indices: list[int], metrics: Metrics) -> Tensor:
        assert step.texts is not None
        texts = [step.texts.token_ids[index] for index in indices]
        batch = pack_texts(texts or [torch.zeros(2, dtype=torch.int64)]).to(self.engine.device)
        if not texts:
            return self.compute_text_loss(batch, step.texts.num_tokens, Metrics()) * 0.0
        loss = self.compute_text_loss(batch, step.texts.num_tokens, metrics)
        _check_finite(loss, "pre-training text")
        return loss

    def compute_loss(
        self, batch: PackedBatch, experience: Experience, step: UpdateStep, metrics: Metrics
    ) -> Tensor:
        """Return the loss () of a packed row, with the denominators of the step."""
        raise NotImplementedError

    def compute_text_loss(self, batch: PackedBatch, num_tokens: int, metrics: Metrics) -> Tensor:
        """Return the loss () of packed text; `num_tokens` are those of the step on all ranks."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Act on the weights after an optimizer step."""

    def aggregated(
        self, values_N: Tensor, experience: Experience, step: UpdateStep, mode: str | None = None
    ) -> Tensor:
        """Return the part of a micro-batch in the step's mean of per-token values, ()."""
        return aggregate(
            values_N,
            experience.num_actions,
            mode=mode or self.config.algo.loss_aggregation,
            num_tokens_global=step.num_tokens,
            num_seqs_global=step.num_samples,
            max_new_tokens=self.config.rollout.max_new_tokens,
        )

    def unseen(self, path: str) -> str | None:
        """Return the name of this rank if it does not see a file or folder of the controller's."""
        if Path(path).exists():
            return None
        identity = self.identity
        return f"{identity.role} rank {identity.rank} on node {node_address()}"

    @frees_cache
    def save_states(self, folder: str) -> None:
        """Write weights, optimizer, schedule and random numbers into a checkpoint's folder; all
        ranks call. Raise CheckpointError on all or none.
        """
        # A run that is stopped is saved without --save_steps too, and was not checked at its start.
        together(lambda: self._check_is_seen(folder))
        self.engine.save_states(Path(folder) / self.identity.role)
        together(lambda: self.save_own(Path(folder)))

    @frees_cache
    def load_states(self, folder: str) -> bool:
        """Load what `save_states` wrote; return True if random numbers go on where they stood,
        which they cannot on another number of ranks.
        """
        self.engine.load_states(Path(folder) / self.identity.role)
        return together(lambda: self.load_own(Path(folder)))

    @frees_cache
    def export(self, path: str) -> None:
        """Export the model beside a checkpoint; raise CheckpointError on all ranks or none."""
        together(lambda: self.save_model(path))

    def save_model(self, path: str, tensors: NamedTensors | None = None) -> None:
        """Export in Hugging Face format; all ranks take part, rank 0 writes."""
        tokenizer = load_policy_tokenizer(self.config)
        export_hf(self.engine, self.model.model, tokenizer, Path(path), tensors=tensors)

    def own_state(self) -> dict[str, Any]:
        """Return the state of this process alone, as JSON."""
        return {"random": random_state(), "world_size": world_size()}

    def save_own(self, folder: Path) -> None:
        """Write what is not the engine's."""
        write_json(self._own_file(folder, self.identity.rank), self.own_state())

    def load_own(self, folder: Path) -> bool:
        """Load it; on another number of ranks from the file of rank 0."""
        state = json.loads(self._own_file(folder, 0).read_text())
        has_same_ranks = bool(state["world_size"] == world_size())
        if has_same_ranks:
            state = json.loads(self._own_file(folder, self.identity.rank).read_text())
            set_random_state(state["random"])
        self.take_own_state(state)
        return has_same_ranks

    def take_own_state(self, state: dict[str, Any]) -> None:
        """Load what `own_state` returned."""

    def _check_is_seen(self, folder: str) -> None:
        if unseen := self.unseen(folder):
            raise FileNotFoundError(
                f"{folder} is not seen by {unseen}: --ckpt_path must be on a file system that all "
                "nodes share."
            )

    def _own_file(self, folder: Path, rank: int) -> Path:
        return folder / f"{self.identity.role}_rank{rank}.json"


def _check_finite(loss: Tensor, what: str) -> None:
    if not math.isfinite(loss.item()):
        raise NumericsError(f"the loss is {loss.item()} for {what}; weights were not changed")
