"""The models other than the policy: the critic, the reference policy and the reward model; and a
policy that is not trained.
"""

from collections.abc import Sequence

from torch import Tensor

from openrlhf.algorithms.policy_loss import value_loss
from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.train_engine import EvalEngine
from openrlhf.engines.base import Completion, GenerationRequest
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import add_lora
from openrlhf.models.loading import disable_dropout, load_causal_lm, load_sequence_model
from openrlhf.models.value_head import CriticModel, RewardModel
from openrlhf.trainer.ppo_utils.samples import Samples
from openrlhf.trainer.ppo_utils.update_plan import UpdateStep
from openrlhf.trainer.workers.model_worker import ModelWorker, TrainedWorker
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tokenizer import tokenizer_of


class CriticModelActor(TrainedWorker):
    """One rank of the critic."""

    title, prefix = "critic", "critic"

    def init_model(self, num_updates: int) -> int:
        """Load and shard the critic; return its parameter count."""
        config = self.config
        assert config.critic_source is not None, "checked by the configuration"
        model = add_lora(load_sequence_model(config.critic_source, config), config.ds.lora)
        disable_dropout(model)
        return self.prepare(CriticModel(model), config.critic, num_updates)

    def compute_values(self, samples: Samples) -> Tensor:
        """Return values (N,) before each sampled token of the share."""
        return self.forward_in_micro_batches(samples, self.engine, what="values")

    def compute_loss(
        self, batch: PackedBatch, samples: Samples, step: UpdateStep, metrics: Metrics
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the clipped value loss ()."""
        values_N = self.engine(batch)
        assert samples.values is not None and samples.returns is not None
        loss_N = value_loss(
            values_N,
            samples.values,
            returns_N=samples.returns,
            clip=self.config.critic.value_clip,
        )
        loss = self.aggregated(loss_N, samples, step)
        metrics.add("critic_loss", loss.double() / step.num_steps, reduction="sum")
        return loss, {"new_values": values_N, "value_loss": loss_N}


class ReferenceModelActor(ModelWorker):
    """One rank of the frozen reference policy."""

    config: PPOConfig
    engine: EvalEngine

    def init_model(self) -> int:
        """Load the reference; return its parameter count."""
        config = self.config
        model = load_causal_lm(config.policy_path, self.config)
        num_parameters = sum(p.numel() for p in model.parameters())
        self.engine = self.strategy.prepare_eval(Actor(model), offload=config.ref.offload)
        return num_parameters

    def compute_logprobs(self, samples: Samples) -> Tensor:
        """Return log-probs (N,) of the share's sampled tokens, at the sampling temperature."""
        temperature = self.config.rollout.temperature
        return self.forward_in_micro_batches(
            samples,
            lambda batch: self.engine(batch, temperature=temperature).logprobs,
            what="log-probs of the reference",
        )


class FrozenPolicyActor(ModelWorker):
    """One rank of a policy that only generates, itself, for `openrlhf eval` without vLLM."""

    def init_model(self) -> int:
        """Load the policy; return its parameter count."""
        model = load_causal_lm(self.config.policy_path, self.config).eval()
        model = model if self.config.ds.load_in_4bit else model.to(self.strategy.device)
        self.generator = OwnGenerate(
            model,
            tokenizer=tokenizer_of(self.config, self.config.policy_path),
            processor=self.image_processor,
        )
        return sum(p.numel() for p in model.parameters())

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Sample with the policy."""
        return self.generator.generate(requests)


class RewardModelActor(ModelWorker):
    """One rank of a local reward model."""

    engine: EvalEngine

    def init_model(self, path: str) -> int:
        """Load the reward model; return its parameter count."""
        config = self.config
        hf_model = load_sequence_model(path, config, allow_fresh_head=False)
        model = RewardModel(hf_model, normalize_reward=config.reward.normalize_enable)
        num_parameters = sum(p.numel() for p in model.parameters())
        self.engine = self.strategy.prepare_eval(model, offload=config.reward.offload)
        return num_parameters

    def compute_rewards(self, samples: Samples) -> Tensor:
        """Return rewards (B,) of the share's samples, read at their last token."""
        return self.forward_in_micro_batches(
            samples, lambda batch: self.engine(batch).scores, what="rewards"
        )
