"""Builds an RL run and drives it: on a Ray cluster (`run_ppo_ray`) or in this process
(`run_ppo_local`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch

from openrlhf.config.cli import save_resolved
from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.problems import Gathered
from openrlhf.datasets.tokenized import as_recognised, undecided
from openrlhf.distributed.checkpoints import RunCheckpoints, export_final
from openrlhf.distributed.collectives import naming_lost_ranks
from openrlhf.distributed.run_folder import holding_folders
from openrlhf.distributed.topology import Topology
from openrlhf.engines.base import RolloutEngine
from openrlhf.models.loading import DTYPES, say_attention
from openrlhf.models.support import check_here
from openrlhf.rollout.agents.episodes import agent_limits, agent_rollouts
from openrlhf.rollout.agents.worker import AgentSetup
from openrlhf.rollout.engine_pool import BatchSampler, EnginePool, Sampler
from openrlhf.rollout.rollout import Rollouts
from openrlhf.rollout.scoring import (
    FailurePolicy,
    GroupScorer,
    Scorer,
    SourceScorer,
)
from openrlhf.rollout.single_turn import SingleTurn
from openrlhf.rollout.step_sampler import GroupFilter
from openrlhf.trainer.ppo_banner import banner_sections
from openrlhf.trainer.ppo_checkpoints import (
    PPOCheckpoints,
    best_metric,
    check_is_shared,
    is_at_end,
    open_run,
)
from openrlhf.trainer.ppo_setup import (
    RunInputs,
    Schedule,
    check_runs_without_ray,
    make_schedule,
    named_models,
    needs_old_logprobs,
    only_busy_samples_count,
    prepare_inputs,
    schedule_notes,
)
from openrlhf.trainer.ppo_trainer import PPOParts, PPOTrainer
from openrlhf.trainer.ppo_trainer_async import PPOTrainerAsync
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.model_scorer import ModelScorer, model_names
from openrlhf.trainer.ppo_utils.replay_buffer import TextMixer
from openrlhf.trainer.ppo_utils.worker_group import ForwardPass, WorkerGroup
from openrlhf.trainer.ray.cluster import LocalCluster, RayCluster
from openrlhf.trainer.ray.launcher import ray_session
from openrlhf.trainer.ray.phases import DevicePhases
from openrlhf.trainer.ray.placement import (
    TRAINED_ROLES,
    pools_of,
    reward_roles,
    role_counts,
    view_cluster,
)
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.trainer.ray.ppo_critic import CriticModelActor
from openrlhf.trainer.ray.scorers import ReferenceModelActor, RewardModelActor
from openrlhf.trainer.ray.vllm_engine import GroupGenerator
from openrlhf.utils import stopping
from openrlhf.utils.logging import (
    notice,
    print_banner,
    redirect_framework_logs,
    say_notices,
    warn,
)
from openrlhf.utils.progress import progress
from openrlhf.utils.tracking import RolloutWriter, make_tracker

MISMATCH_KL_FP32 = 1e-3
MISMATCH_KL_HALF = 0.1

Groups = dict[str, WorkerGroup]
OpenCluster = Callable[[PPOConfig, str, int], AbstractContextManager[LocalCluster]]


def run_ppo_ray(config: PPOConfig) -> None:
    """Train on a Ray cluster: the one there is, else one started on this machine."""
    has_engines = config.vllm.num_engines != 0
    _prepare_and_run(config, _ray_cluster, Gathered(), has_engines=has_engines)


def run_ppo_local(config: PPOConfig) -> None:
    """Train in this process, without Ray."""
    topology = Topology.from_env(local_rank=config.local_rank)
    gathered = Gathered()
    gathered.attempt(lambda: check_runs_without_ray(config, topology.world_size))
    # On Ray models are elsewhere: each worker looks at its own machine.
    gathered.attempt(lambda: check_here(config.ds))
    has_engines = bool(config.vllm.num_engines)
    _prepare_and_run(config, LocalCluster, gathered, has_engines=has_engines)


@contextmanager
def _ray_cluster(config: PPOConfig, run_dir: str, resume_step: int) -> Iterator[LocalCluster]:
    with ray_session():
        counts = role_counts(config, view_cluster())
        with RayCluster(config, counts, run_dir=run_dir, resume_step=resume_step) as cluster:
            yield cluster


def _prepare_and_run(
    config: PPOConfig, open_cluster: OpenCluster, gathered: Gathered, *, has_engines: bool
) -> None:
    inputs = prepare_inputs(config, has_engines=has_engines, gathered=gathered)
    config = as_recognised(config, inputs.prompts, inputs.eval_prompts)
    with inputs, holding_folders(config.ckpt):
        redirect_framework_logs(inputs.run_dir, "driver")
        opened = open_run(config, inputs)
        if opened.is_done(inputs.run_dir, is_at_end=is_at_end(opened, config)):
            return
        run_dir = str(inputs.run_dir.resolve())
        with open_cluster(config, run_dir, opened.resume_step or 0) as cluster:
            _run(config, inputs, cluster, opened)


def _run(
    config: PPOConfig, inputs: RunInputs, cluster: LocalCluster, opened: RunCheckpoints
) -> None:
    schedule = make_schedule(config, len(inputs.prompts))
    say_notices(schedule_notes(config, schedule))
    say_attention(config, config.ds.attention, named_models(config))
    if inputs.reward_source is not None:
        inputs = replace(inputs, reward_source=cluster.on_every_node(inputs.reward_source))
    groups = _start_groups(config, cluster)
    engines = cluster.start_engines()
    cluster.wait_until_up()
    check_is_shared(config, opened, groups)
    # One at a time where reward models and what is trained share devices and run side by side.
    turn = threading.Lock() if config.rewards_take_turns else nullcontext()
    phases = DevicePhases(
        engines,
        engines_sleep=config.vllm.enable_sleep and config.engines_share_devices,
        training_sleeps=config.ds.enable_sleep,
        turn=turn,
    )
    phases.start()
    sizes = _init_models(config, groups, schedule, phases)
    dtype = next((name for name, kind in DTYPES.items() if kind == cluster.policy_dtype), "auto")
    print_banner(
        banner_sections(
            config,
            schedule,
            cluster.counts,
            sizes=sizes,
            num_prompts=len(inputs.prompts),
            dtype=dtype,
        )
    )
    own = GroupGenerator(groups["actor"], PolicyModelActor.generate)
    samplers = list(engines) or [BatchSampler(own.generate)]
    rollouts = _rollouts(config, inputs, groups, cluster, samplers, turn)
    metric = best_metric(config, inputs.eval_prompts)
    checkpoints = PPOCheckpoints(opened, groups, phases, best_metric=metric)
    opened.clear_folder(inputs.run_dir, config)
    parts = _assemble(config, inputs, cluster, checkpoints, groups, rollouts, engines)
    trainer = (PPOTrainerAsync if config.train.async_enable else PPOTrainer)(config, parts)
    parts.checkpoints.resume(trainer.state)
    # What is refused leaves the folder as it was.
    unsaid = undecided(config, inputs.prompts, inputs.eval_prompts)
    save_resolved(config, inputs.run_dir / "config.yaml", without=unsaid)
    with stopping.patiently(config.ckpt.grace_s), naming_lost_ranks():
        trainer.fit()
    _export(config, groups)
    opened.note_finished(inputs.run_dir, trainer.state.global_step)
    notice(f"model saved to {inputs.run_dir}")
    fall = trainer.fall()
    if fall is not None:
        warn(fall)


def _start_groups(config: PPOConfig, cluster: LocalCluster) -> Groups:
    groups: Groups = {"actor": cluster.start_group("actor", PolicyModelActor)}
    if config.has_reference:
        groups["ref"] = cluster.start_group("ref", ReferenceModelActor)
    for role in reward_roles(config):
        groups[role] = cluster.start_group(role, RewardModelActor)
    if config.has_critic:
        groups["critic"] = cluster.start_group("critic", CriticModelActor)
    return groups


def _init_models(
    config: PPOConfig, groups: Groups, schedule: Schedule, phases: DevicePhases
) -> dict[str, int]:
    """Load all models and return their parameter counts by role.

    Roles that share devices load one after another, the others at the same time.
    """
    classes = {
        "actor": (PolicyModelActor, (schedule.num_actor_updates,)),
        "critic": (CriticModelActor, (schedule.num_critic_updates,)),
        "ref": (ReferenceModelActor, ()),
        **{role: (RewardModelActor, (path,)) for role, path in reward_roles(config).items()},
    }
    pools: dict[str, list[str]] = {}
    for role, pool in pools_of(config, groups).items():
        pools.setdefault(pool, []).append(role)
    sizes = {}
    with progress("getting models ready", len(groups)) as advance:
        for wave in zip_longest(*pools.values()):
            pending = {}
            for role in filter(None, wave):
                worker_class, args = classes[role]
                shares = [args] * groups[role].num_shares
                pending[role] = groups[role].start(worker_class.init_model, shares)  # type: ignore[attr-defined]
            for role, wait in pending.items():
                sizes[role] = wait()[0]
                if role in TRAINED_ROLES:
                    phases.put_away(groups[role])
                advance()
    return sizes


def _assemble(
    config: PPOConfig,
    inputs: RunInputs,
    cluster: LocalCluster,
    checkpoints: PPOCheckpoints,
    groups: Groups,
    rollouts: Rollouts,
    engines: Sequence[RolloutEngine],
) -> PPOParts:
    schedule, algo = make_schedule(config, len(inputs.prompts)), config.algo
    return PPOParts(
        actor=groups["actor"],
        critic=groups.get("critic"),
        engines=engines,
        rollouts=rollouts,
        experience_maker=_experience_maker(config, groups, schedule),
        phases=checkpoints.phases,
        prompts=inputs.prompts,
        eval_prompts=inputs.eval_prompts,
        group_filter=GroupFilter(*algo.dynamic_filtering_range, algo.dynamic_filtering_max_empty)
        if algo.dynamic_filtering_enable
        else None,
        sampling=inputs.sampling,
        eval_sampling=inputs.eval_sampling,
        tracker=make_tracker(
            config.logger,
            inputs.run_dir,
            config.model_dump(mode="json"),
            resume_step=checkpoints.opened.resume_step,
        ),
        rollout_writer=RolloutWriter(inputs.run_dir, num_kept=config.rollout.num_kept_files),
        checkpoints=checkpoints,
        texts=None if inputs.texts is None else TextMixer(inputs.texts, seed=config.train.seed),
        max_mismatch_kl=max_mismatch_kl(cluster.policy_dtype),
    )


def _rollouts(
    config: PPOConfig,
    inputs: RunInputs,
    groups: Groups,
    cluster: LocalCluster,
    samplers: Sequence[Sampler],
    turn: AbstractContextManager[object],
) -> Rollouts:
    """Return what makes scored samples: engines and rewards, or agents that act through engines."""
    if config.train.agent_func_path:
        path, limits = config.train.agent_func_path, agent_limits(config)
        setup = AgentSetup(path, inputs.tokenizer, limits, inputs.vocab_size)
        return agent_rollouts(setup, samplers, FailurePolicy.of(config))
    reward = config.reward
    if inputs.reward_source is not None:
        scorer: Scorer = SourceScorer(
            inputs.reward_source,
            config.rollout.micro_batch_size,
            max_steps=make_schedule(config, len(inputs.prompts)).num_steps,
        )
    else:
        has_own_devices = isinstance(cluster, RayCluster) and not config.train.colocate_all
        # Where engines do not pause, models that share their devices cannot wait for a pause.
        never_pauses = config.train.async_enable or config.algo.dynamic_filtering_enable
        names = model_names(reward.model_paths)
        forwards = {
            name: ForwardPass(groups[role], RewardModelActor.compute_rewards, axis="sample")
            for name, role in zip(names, reward_roles(config), strict=True)
        }
        scorer = ModelScorer(
            forwards,
            reward.weights,
            is_sequential=config.train.colocate_all,
            is_streaming=has_own_devices or never_pauses,
            turn=turn,
        )
    turns = SingleTurn(EnginePool(samplers), inputs.tokenizer, vocab_size=inputs.vocab_size)
    return Rollouts(turns, GroupScorer(scorer, FailurePolicy.of(config)))


def _experience_maker(
    config: PPOConfig, groups: Groups, schedule: Schedule
) -> RemoteExperienceMaker:
    forwards = {}
    if needs_old_logprobs(config, schedule):
        method = PolicyModelActor.compute_logprobs
        forwards["old_logprobs"] = ForwardPass(groups["actor"], method)
    if "critic" in groups:
        forwards["values"] = ForwardPass(groups["critic"], CriticModelActor.compute_values)
    if "ref" in groups:
        forwards["ref_logprobs"] = ForwardPass(groups["ref"], ReferenceModelActor.compute_logprobs)
    return RemoteExperienceMaker(
        config,
        forwards,
        is_sequential=config.train.colocate_all,
        only_busy=only_busy_samples_count(config),
    )


def max_mismatch_kl(dtype: torch.dtype) -> float:
    """Return the largest mismatch KL allowed for a type of weights: half precision rounds."""
    return MISMATCH_KL_FP32 if dtype == torch.float32 else MISMATCH_KL_HALF


def _export(config: PPOConfig, groups: Groups) -> None:
    methods = {"actor": PolicyModelActor.save_model}
    if "critic" in groups and config.critic.save_value_network:
        methods["critic"] = CriticModelActor.save_model
    for role, method in methods.items():
        path = Path(config.ckpt.output_dir + ("_critic" if role == "critic" else ""))
        export_final(lambda path, call=groups[role].call, m=method: call(m, str(path)), path)
