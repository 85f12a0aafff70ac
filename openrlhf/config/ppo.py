"""Config of train_ppo_ray and train_ppo: `PPOConfig`, and the rules that its fields keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from openrlhf.config.base import Caution, is_blank, is_given
from openrlhf.config.common import CheckpointConfig, DeepSpeedConfig, LoggerConfig, logger_of
from openrlhf.config.ppo_parts import (
    DEFAULT_GROUP_SIZE,
    GROUP_ESTIMATORS,
    ActorConfig,
    AlgoConfig,
    CriticConfig,
    FrozenConfig,
    PPODataConfig,
    PPOEvalConfig,
    PPOTrainConfig,
    RewardConfig,
    RolloutConfig,
    VLLMConfig,
)
from openrlhf.config.run import RunConfig


class PPOConfig(RunConfig):
    """Reinforcement learning: PPO, REINFORCE++, RLOO, GRPO and their kin."""

    dead_flags: ClassVar[tuple[str, ...]] = ("actor_init_on_gpu", "perf")

    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    ref: FrozenConfig = FrozenConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    vllm: VLLMConfig = VLLMConfig()
    algo: AlgoConfig = AlgoConfig()
    train: PPOTrainConfig = PPOTrainConfig(micro_batch_size=4)
    data: PPODataConfig = PPODataConfig(input_template=None)
    eval: PPOEvalConfig = PPOEvalConfig()
    ds: DeepSpeedConfig = DeepSpeedConfig()
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_ppo_ray")
    logger: LoggerConfig = logger_of("openrlhf_train_ppo", "ppo")

    def derived(self) -> Iterator[tuple[str, object]]:
        """Add group size, placement, checkpointing of the critic and room for the prompt."""
        yield from super().derived()
        if self.has_group_estimator and not is_given(self, "rollout.n_samples_per_prompt"):
            yield "rollout.n_samples_per_prompt", DEFAULT_GROUP_SIZE
        yield from self._shapes_of_partners()
        for name in ("gradient_checkpointing_enable", "gradient_checkpointing_reentrant"):
            if not is_given(self, f"critic.{name}"):
                yield f"critic.{name}", getattr(self.actor, name)
        if self.data.max_len is not None:
            yield from self._shares_of_total_length(self.data.max_len)

    def _shapes_of_partners(self) -> Iterator[tuple[str, object]]:
        """Models that share GPUs: the first has the shape of a partner, where nobody gave its own;
        then all others have the shape of the first.
        """
        for name in ("num_nodes", "num_gpus_per_node"):
            for first, second in self.colocated_pairs():
                if self._is_set(second, name) and not self._is_set(first, name):
                    yield f"{first}.{name}", getattr(getattr(self, second), name)
                    break
            for first, second in self.colocated_pairs():
                if not self._is_set(second, name):
                    yield f"{second}.{name}", getattr(getattr(self, first), name)

    def _is_set(self, section: str, name: str) -> bool:
        """Whether somebody gave it a value; a saved config gives "unset" too."""
        return (
            is_given(self, f"{section}.{name}")
            and getattr(getattr(self, section), name) is not None
        )

    def _shares_of_total_length(self, total: int) -> Iterator[tuple[str, object]]:
        has_prompt = is_given(self, "data.prompt_max_len")
        if not is_given(self, "rollout.max_new_tokens"):
            room = total - self.data.prompt_max_len if has_prompt else total // 2
            yield "rollout.max_new_tokens", max(1, min(self.rollout.max_new_tokens, room))
        if not has_prompt:
            yield "data.prompt_max_len", max(1, total - self.rollout.max_new_tokens)

    @property
    def has_group_estimator(self) -> bool:
        """Whether rewards are compared within the samples of a prompt."""
        return self.algo.advantage.estimator in GROUP_ESTIMATORS

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained: with the estimator gae only."""
        return self.algo.advantage.estimator == "gae"

    @property
    def critic_source(self) -> str | None:
        """Model a critic starts from: its own, else the first reward model, else the policy."""
        named = (self.critic.model_name_or_path, *self.reward.model_paths)
        return next(filter(None, named), self.actor.model_name_or_path)

    @property
    def num_rollout_samples(self) -> int:
        """Samples in a step."""
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    @property
    def engines_share_devices(self) -> bool:
        """Whether models and engines take turns on the same devices: not when both run at once."""
        return self.train.colocate_all and not self.train.async_enable

    @property
    def rewards_take_turns(self) -> bool:
        """Whether reward models score beside training, on devices of what is trained."""
        with_critic = self.train.colocate_critic_reward and self.has_critic
        return self.train.async_enable and (self.train.colocate_all or with_critic)

    def colocated_pairs(self) -> Iterator[tuple[str, str]]:
        """Pairs of roles that share GPUs, the one that sets the shape first."""
        if self.train.colocate_all or self.train.colocate_actor_ref:
            yield "actor", "ref"
        if self.train.colocate_all:
            yield "actor", "reward"
            if self.has_critic:
                yield "actor", "critic"
        elif self.train.colocate_critic_reward and self.has_critic:
            yield "critic", "reward"

    def problems(self) -> Iterator[str]:
        """Add what is wrong with rewards, samples, lengths, placement and asynchronous training."""
        yield from super().problems()
        num_images = self.data.max_images_per_prompt
        if num_images > 0 or self.actor.freeze_visual_encoder:
            flag = (
                f"--max_images_per_prompt {num_images}" if num_images else "--freeze_visual_encoder"
            )
            yield f"not yet implemented: {flag} (vision-language models). Leave it out."
        yield from self._reward_problems()
        yield from self._sample_problems()
        yield from self.algo.advantage.problems()
        yield from self.ds.problems(self.actor, self.critic)
        yield from self.actor.router_loss_problems(self.actor.aux_loss_coef)
        yield from self._shape_problems()
        yield from self._async_problems()

    def _reward_problems(self) -> Iterator[str]:
        sources = {
            "--reward_pretrain": self.reward.model_name_or_path,
            "--remote_rm_url": self.reward.remote_url,
            "--agent_func_path": self.train.agent_func_path,
        }
        named = [f"{flag} {source}" for flag, source in sources.items() if not is_blank(source)]
        if not named:
            yield (
                "There is no reward. Type --reward_pretrain with a model, "
                "--remote_rm_url with a .py file or a URL, or --agent_func_path."
            )
        if len(named) > 1:
            yield (
                f"{' and '.join(named)} both give rewards. Leave one out (--critic_pretrain names "
                "the model that a critic starts from)."
            )
        yield from self.reward.weight_problems(len(self.reward.model_paths))

    def _sample_problems(self) -> Iterator[str]:
        estimator, gamma = self.algo.advantage.estimator, self.algo.advantage.gamma
        prompts, group = self.rollout.batch_size, self.rollout.n_samples_per_prompt
        batch_size, num_samples = self.train.batch_size, self.num_rollout_samples
        if self.has_group_estimator and group == 1:
            yield (
                f"--advantage_estimator {estimator} compares the samples of a prompt, and "
                f"--n_samples_per_prompt is 1. Type --n_samples_per_prompt {DEFAULT_GROUP_SIZE} "
                "(or any number above 1)."
            )
        elif self.algo.dynamic_filtering_enable and group == 1:
            yield (
                "--dynamic_filtering keeps prompts whose samples score differently, and "
                f"--n_samples_per_prompt is 1. Type --n_samples_per_prompt {DEFAULT_GROUP_SIZE}."
            )
        if estimator not in ("gae", "reinforce") and gamma != 1:
            yield f"--advantage_estimator {estimator} needs --gamma 1: {gamma}. Type --gamma 1."
        if batch_size > num_samples:
            yield (
                f"--train_batch_size {batch_size} is more than the {num_samples} samples of a step "
                f"(--rollout_batch_size {prompts} x --n_samples_per_prompt {group}). Type "
                f"--train_batch_size {num_samples} or "
                f"--rollout_batch_size {-(-batch_size // group)}."
            )
        total, wanted = self.data.max_len, self.data.prompt_max_len + self.rollout.max_new_tokens
        if total is not None and total < wanted:
            yield (
                f"--max_len {total} is less than --prompt_max_len {self.data.prompt_max_len} + "
                f"--generate_max_len {self.rollout.max_new_tokens}. Type --max_len {wanted}."
            )
        buffer, response = self.reward.overlong_buffer_len, self.rollout.max_new_tokens
        if buffer is not None and buffer > response:
            yield (
                f"--overlong_buffer_len {buffer:g} is more than --generate_max_len {response}. "
                f"Type --overlong_buffer_len {response // 4}."
            )

    def _shape_problems(self) -> Iterator[str]:
        for first, second in self.colocated_pairs():
            for name in ("num_nodes", "num_gpus_per_node"):
                mine, theirs = (getattr(getattr(self, role), name) for role in (first, second))
                if None not in (mine, theirs) and mine != theirs:
                    yield (
                        f"--{second}_{name} {theirs} differs from --{first}_{name} {mine}, and the "
                        f"two models share their GPUs. Type --{second}_{name} {mine}."
                    )

    def _async_problems(self) -> Iterator[str]:
        train, size = self.train, self.rollout.vllm_generate_batch_size
        if train.async_enable and self.vllm.num_engines == 0:
            yield (
                "--async_train needs engines of its own, and --vllm_num_engines is 0: the "
                "policy cannot generate while it is trained. Type --vllm_num_engines 1."
            )
        if train.async_enable:
            return
        if train.partial_rollout_enable:
            yield (
                "--partial_rollout changes weights under running samples, and without "
                "--async_train none run then. Add --async_train."
            )
        if size is not None and size > self.rollout.batch_size:
            yield (
                f"--vllm_generate_batch_size {size} is more than --rollout_batch_size "
                f"{self.rollout.batch_size}: only --async_train generates ahead. Add it, or type "
                f"--vllm_generate_batch_size {self.rollout.batch_size}."
            )

    def notices(self) -> Iterator[str]:
        """Add the group size, a KL that does not do what it seems to, and stale samples."""
        yield from super().notices()
        advantage, kl = self.algo.advantage, self.algo.kl
        if self.has_group_estimator and not is_given(self, "rollout.n_samples_per_prompt"):
            group = self.rollout.n_samples_per_prompt
            yield f"--advantage_estimator {advantage.estimator}: {group} samples of each prompt."
        if kl.init_coef > 0 and kl.use_loss and kl.estimator == "k1" and not kl.unbiased_gradient:
            yield Caution(
                "--use_kl_loss with --kl_estimator k1: its gradient does not pull to the "
                "reference. Type --kl_estimator k2 or k3, or add --algo.kl.unbiased_gradient."
            )
        if kl.init_coef > 0 and not kl.use_loss and kl.estimator != "k1":
            yield Caution(
                f"--kl_estimator {kl.estimator} without --use_kl_loss: as a reward term it is "
                "biased. Type --kl_estimator k1, or add --use_kl_loss."
            )
        if self.train.async_enable and not advantage.is_corrected:
            yield (
                f"--async_train: samples up to {self.train.async_queue_size} update(s) old count "
                "as if they were new. --enable_vllm_is_correction weighs them by how likely they "
                "are now."
            )
