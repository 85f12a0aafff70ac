"""The critic on its training ranks: values and updates."""

from torch import Tensor

from openrlhf.algorithms.policy_loss import value_loss
from openrlhf.models.adapters import add_lora
from openrlhf.models.loading import disable_dropout, load_sequence_model
from openrlhf.models.value_head import CriticModel
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.replay_buffer import UpdateStep
from openrlhf.trainer.ray.model_actor import TrainedWorker
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch


class CriticModelActor(TrainedWorker):
    """One rank of the critic."""

    title, prefix = "critic", "critic"

    def init_model(self, num_updates: int) -> int:
        """Load and shard the critic; return its parameter count."""
        config = self.config
        assert config.critic_source is not None, "checked by the configuration"
        model = load_sequence_model(config.critic_source, config)
        disable_dropout(model)
        critic = CriticModel(add_lora(model, config.ds.lora))
        return self.prepare(critic, config.critic, num_updates)

    def compute_values(self, experience: Experience) -> Tensor:
        """Values (N,) before each sampled token of the share."""
        return self.forward_in_micro_batches(experience, self.engine, what="values")

    def compute_loss(
        self, batch: PackedBatch, experience: Experience, step: UpdateStep, metrics: Metrics
    ) -> Tensor:
        """Return the clipped value loss ()."""
        values_N = self.engine(batch)
        assert experience.values is not None and experience.returns is not None
        loss_N = value_loss(
            values_N,
            experience.values,
            returns_N=experience.returns,
            clip=self.config.critic.value_clip,
        )
        loss = self.aggregated(loss_N, experience, step)
        metrics.add("critic_loss", loss.item() / step.num_steps, reduction="sum")
        return loss
