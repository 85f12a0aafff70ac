"""Config of train_ppo_ray and train_ppo: `PPOConfig`, and every rule that its fields keep.

A rule is a method `check_...` (refused) or `note_...` (said, then on we go) that yields one line
for each case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from openrlhf.config.base import Caution, is_blank, is_given
from openrlhf.config.checks import (
    batch_problems,
    router_loss_problems,
    schedule_problems,
    weight_problems,
)
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
        """Defaults that follow: group size, micro-batch, placement, critic, room for the prompt."""
        yield from super().derived()
        if self.has_group_estimator and not is_given(self, "rollout.n_samples_per_prompt"):
            yield "rollout.n_samples_per_prompt", DEFAULT_GROUP_SIZE
        if not is_given(self, "rollout.micro_batch_size"):
            smaller = min(self.rollout.micro_batch_size, self.num_rollout_samples)
            yield "rollout.micro_batch_size", smaller
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

    def check_models_read_text(self) -> Iterator[str]:
        """Vision-language models are not built yet."""
        refused = "not yet implemented: {} (vision-language models). Leave it out."
        if self.actor.freeze_visual_encoder:
            yield refused.format("--freeze_visual_encoder")
        if self.data.max_images_per_prompt > 0:
            yield refused.format(f"--max_images_per_prompt {self.data.max_images_per_prompt}")

    def check_actor_model_is_named(self) -> Iterator[str]:
        """There is no default policy."""
        if is_blank(self.actor.model_name_or_path):
            yield "No policy model is named. Type --pretrain with a hub id or a path."

    def check_prompts_are_named(self) -> Iterator[str]:
        """There are no default prompts."""
        if is_blank(self.data.prompt_dataset):
            yield "No prompts are named. Type --prompt_data with a hub id or a path."

    def check_there_is_a_reward(self) -> Iterator[str]:
        """Something scores the responses."""
        sources = (
            self.reward.model_name_or_path,
            self.reward.remote_url,
            self.train.agent_func_path,
        )
        if all(is_blank(source) for source in sources):
            yield (
                "There is no reward. Type --reward_pretrain with a model, "
                "--remote_rm_url with a .py file or a URL, or --agent_func_path."
            )

    def check_reward_models_stand_alone(self) -> Iterator[str]:
        """Nothing says what a model and a function together would mean."""
        model, url = self.reward.model_name_or_path, self.reward.remote_url
        if not is_blank(model) and not is_blank(url):
            yield (
                f"--reward_pretrain {model} and --remote_rm_url {url} both give rewards. Leave one "
                "out (--critic_pretrain names the model that a critic starts from)."
            )
        agent = self.train.agent_func_path
        for flag, source in (("reward_pretrain", model), ("remote_rm_url", url)):
            if not is_blank(agent) and not is_blank(source):
                yield (
                    f"--agent_func_path {agent} and --{flag} {source} both give rewards. Leave one "
                    "out."
                )

    def check_filtered_groups_have_several_samples(self) -> Iterator[str]:
        """The scores of one sample cannot differ; groups have a rule of their own."""
        is_alone = self.rollout.n_samples_per_prompt == 1 and not self.has_group_estimator
        if self.algo.dynamic_filtering_enable and is_alone:
            yield (
                "--dynamic_filtering keeps prompts whose samples score differently, and "
                f"--n_samples_per_prompt is 1. Type --n_samples_per_prompt {DEFAULT_GROUP_SIZE}."
            )

    def check_groups_have_several_samples(self) -> Iterator[str]:
        """A group of one has no baseline."""
        if self.has_group_estimator and self.rollout.n_samples_per_prompt == 1:
            yield (
                f"--advantage_estimator {self.algo.advantage.estimator} compares the samples of a "
                "prompt, and --n_samples_per_prompt is 1. Type --n_samples_per_prompt "
                f"{DEFAULT_GROUP_SIZE} (or any number above 1)."
            )

    def check_baselines_do_not_discount(self) -> Iterator[str]:
        """Baselines compare whole returns, so gamma is 1."""
        estimator, gamma = self.algo.advantage.estimator, self.algo.advantage.gamma
        if estimator not in ("gae", "reinforce") and gamma != 1:
            yield f"--advantage_estimator {estimator} needs --gamma 1: {gamma}. Type --gamma 1."

    def check_importance_correction_fits_together(self) -> Iterator[str]:
        """Only ratios of tokens can be held in a band, and a distance has no lower bound."""
        config = self.algo.advantage
        gating, (_, high) = config.is_correction_gating, config.is_correction_threshold
        level, mode = config.correction_level_and_mode
        if level == "off" and config.is_correction_enable:
            yield "--is_correction_level off and --enable_vllm_is_correction: leave one out."
        if level == "off" or not config.is_corrected:
            return
        if mode != "mask" and (level == "seq" or gating != "ratio"):
            what = "level seq" if level == "seq" else f"gating {gating}"
            yield (
                f"--is_correction_mode {mode} holds ratios of tokens in a band, and "
                f"--is_correction_{what} is something else. Type --is_correction_mode mask."
            )
        if gating != "ratio" and level not in ("token", "seq"):
            yield (
                f"--is_correction_gating {gating} weighs tokens, and --is_correction_level {level} "
                "weighs sequences. Type --is_correction_level seq."
            )
        if gating == "tv" and high >= 1:
            yield (
                f"--is_correction_gating tv is at most 1, and --is_correction_threshold {high:g} "
                "lets everything pass. Type --is_correction_threshold 0.1."
            )

    def check_optimizer_batch_fits_the_rollout(self) -> Iterator[str]:
        """One optimizer step takes no more samples than a rollout makes."""
        prompts, group = self.rollout.batch_size, self.rollout.n_samples_per_prompt
        batch_size, num_samples = self.train.batch_size, self.num_rollout_samples
        if batch_size > num_samples:
            yield (
                f"--train_batch_size {batch_size} is more than the {num_samples} samples of a step "
                f"(--rollout_batch_size {prompts} x --n_samples_per_prompt {group}). Type "
                f"--train_batch_size {num_samples} or "
                f"--rollout_batch_size {-(-batch_size // group)}."
            )

    def check_micro_batches_fit(self) -> Iterator[str]:
        """A micro-batch is a part of a batch."""
        yield from batch_problems(self.train.micro_batch_size, self.train.batch_size)
        yield from weight_problems(self.ds, self.actor, self.critic)
        yield from router_loss_problems(self.actor.aux_loss_coef, self.actor)
        micro, num_samples = self.rollout.micro_batch_size, self.num_rollout_samples
        if micro > num_samples:
            yield (
                f"--micro_rollout_batch_size {micro} is more than the {num_samples} samples of a "
                f"step. Type --micro_rollout_batch_size {num_samples}."
            )

    def check_lengths_fit(self) -> Iterator[str]:
        """Prompt and response fit into the total, and so does the penalty zone."""
        total, prompt = self.data.max_len, self.data.prompt_max_len
        response = self.rollout.max_new_tokens
        if total is not None and total < prompt + response:
            yield (
                f"--max_len {total} is less than --prompt_max_len {prompt} + --generate_max_len "
                f"{response}. Type --max_len {prompt + response}."
            )
        buffer = self.reward.overlong_buffer_len
        if buffer is not None and not 0 < buffer <= response:
            yield (
                f"--overlong_buffer_len must be above 0 and at most --generate_max_len {response}: "
                f"{buffer}. Type --overlong_buffer_len {response // 4}."
            )

    def check_colocated_models_have_one_shape(self) -> Iterator[str]:
        """Models that share GPUs ask for the same ones."""
        for first, second in self.colocated_pairs():
            yield from self._shape_problems(first, second)

    def _shape_problems(self, first: str, second: str) -> Iterator[str]:
        wanted, other = getattr(self, first), getattr(self, second)
        for name in ("num_nodes", "num_gpus_per_node"):
            mine, theirs = getattr(wanted, name), getattr(other, name)
            if None not in (mine, theirs) and mine != theirs:
                yield (
                    f"--{second}_{name} {theirs} differs from --{first}_{name} {mine}, and the two "
                    f"models share their GPUs. Type --{second}_{name} {mine}."
                )

    def check_asynchronous_training(self) -> Iterator[str]:
        """What generates while others train has engines of its own."""
        train, size = self.train, self.rollout.vllm_generate_batch_size
        if train.async_enable:
            if self.vllm.num_engines == 0:
                yield (
                    "--async_train needs engines of its own, and --vllm_num_engines is 0: the "
                    "policy cannot generate while it is trained. Type --vllm_num_engines 1."
                )
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

    def check_clip_ranges(self) -> Iterator[str]:
        """Bounds stand in order and on the right side of their limits."""
        dual_clip, ranges = self.actor.dual_clip, self.actor.eps_clip_low_high
        if dual_clip is not None and dual_clip <= 1:
            yield f"--dual_clip must be above 1: {dual_clip}. Type --dual_clip 3."
        if ranges is not None and not (0 < ranges[0] < 1 and ranges[1] > 0):
            yield (
                "--eps_clip_low_high needs a low between 0 and 1 and a high above 0: "
                f"{ranges[0]} {ranges[1]}. Type --eps_clip_low_high 0.2 0.27."
            )
        for flag, (low, high) in (
            ("reward_clip_range", self.reward.clip_range),
            ("dynamic_filtering_reward_range", self.algo.dynamic_filtering_range),
        ):
            if not low < high:
                yield f"--{flag} needs low < high: {low} {high}. Type --{flag} {high} {low}."

    def check_reward_weights_match_the_models(self) -> Iterator[str]:
        """One weight for each reward model."""
        models, weights = self.reward.model_paths, self.reward.weights
        if weights is not None and len(weights) != len(models):
            yield (
                f"--reward_weights has {len(weights)} values for {len(models)} models of "
                "--reward_pretrain. Type one weight for each model."
            )

    def check_reward_failure_policy(self) -> Iterator[str]:
        """The policy is one of three."""
        value = self.reward.failure
        if not re.fullmatch(r"fail|drop_group|retry(\(0*[1-9]\d*\))?", value):
            known = "fail, drop_group, retry or 'retry(5)'"
            yield f"--reward_failure is unknown: {value}. Type {known}."

    def check_learning_rate_schedules(self) -> Iterator[str]:
        """The schedules have names that exist."""
        for name in dict.fromkeys((self.actor.lr_scheduler, self.critic.lr_scheduler)):
            yield from schedule_problems(name)

    def note_group_size(self) -> Iterator[str]:
        """The default number of samples depends on the estimator."""
        estimator, group = self.algo.advantage.estimator, self.rollout.n_samples_per_prompt
        if self.has_group_estimator and not is_given(self, "rollout.n_samples_per_prompt"):
            yield f"--advantage_estimator {estimator}: {group} samples of each prompt."

    def note_kl_estimator(self) -> Iterator[str]:
        """In the reward k1 is unbiased; in the loss only k2 and k3 have a useful gradient."""
        kl = self.algo.kl
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

    def note_stale_samples_are_not_corrected(self) -> Iterator[str]:
        """The ratio of the loss is taken to the policy of the step, not to the one that sampled."""
        if self.train.async_enable and not self.algo.advantage.is_corrected:
            yield (
                f"--async_train: samples up to {self.train.async_queue_size} update(s) old count "
                "as if they were new. --enable_vllm_is_correction weighs them by how likely they "
                "are now."
            )
