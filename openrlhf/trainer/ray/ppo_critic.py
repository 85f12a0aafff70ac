"""The critic on its training ranks: values and updates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from openrlhf.algorithms.policy_loss import aggregate, value_loss
from openrlhf.distributed.export import export_hf
from openrlhf.models.adapters import add_lora
from openrlhf.models.loading import disable_dropout, load_sequence_model
from openrlhf.models.value_head import CriticModel
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.replay_buffer import UpdateStep
from openrlhf.trainer.ppo_utils.update_loop import UpdateHooks, run_updates
from openrlhf.trainer.ppo_utils.vocabulary import load_policy_tokenizer
from openrlhf.trainer.ray.model_actor import frees_cache
from openrlhf.trainer.ray.trained_worker import TrainedWorker
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch


class CriticModelActor(TrainedWorker):
    """One rank of the critic."""

    @frees_cache
    def init_model(self, num_updates: int) -> int:
        """Load and shard the critic; answers the parameter count."""
        config = self.config
        model = load_sequence_model(
            self.source, value_head_prefix=config.ds.value_head_prefix, **self.load_options
        )
        disable_dropout(model)
        self.critic = CriticModel(add_lora(model, config.ds.lora))
        if config.critic.gradient_checkpointing_enable:
            self.critic.gradient_checkpointing_enable(
                config.critic.gradient_checkpointing_reentrant
            )
        num_parameters = sum(p.numel() for p in self.critic.parameters())
        self.engine = self.strategy.prepare_train(
            self.critic, config.critic, num_updates=num_updates
        )
        return num_parameters

    @property
    def source(self) -> str:
        """Where the critic starts."""
        path = self.config.critic_source
        assert path is not None, "checked by the configuration"
        return path

    def compute_values(self, experience: Experience) -> Tensor:
        """Values (N,) before each sampled token of the share."""
        return self.forward_in_micro_batches(experience, self.engine, what="values")

    @frees_cache
    def fit(self, steps: Sequence[UpdateStep]) -> Metrics:
        """All optimizer steps of one rollout batch on this rank's shares."""
        with self.working("updating the critic") as advance:
            metrics = run_updates(
                self.engine,
                steps,
                self.compute_loss,
                plan=self.train_plan,
                reduce_max=self.strategy.all_reduce_max,
                hooks=UpdateHooks(advance=advance),
            )
        return metrics.renamed({"lr": "critic_lr", "grad_norm": "critic_grad_norm"})

    def compute_loss(
        self, batch: PackedBatch, experience: Experience, step: UpdateStep, metrics: Metrics
    ) -> Tensor:
        """The clipped value loss on one micro-batch."""
        values_N = self.engine(batch)
        assert experience.values is not None and experience.returns is not None
        terms = value_loss(
            values_N,
            experience.values,
            returns_N=experience.returns,
            clip=self.config.critic.value_clip,
        )
        loss = aggregate(
            terms.loss_N,
            experience.num_actions,
            mode=self.config.algo.loss_aggregation,
            num_tokens_global=step.num_tokens,
            num_seqs_global=step.num_samples,
            max_new_tokens=self.config.rollout.max_new_tokens,
        )
        metrics.add("critic_loss", loss.item() / step.num_steps, reduction="sum")
        return loss

    def save_model(self, path: str) -> None:
        """Export in Hugging Face format; all ranks take part, rank 0 writes."""
        tokenizer = load_policy_tokenizer(self.config)
        export_hf(self.engine, self.critic.model, tokenizer, Path(path))
