"""Builds an RL run and drives it: on a Ray cluster (`run_ppo_ray`) or in this process
(`run_ppo_local`).
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

from torch import Tensor

from openrlhf.commands.rl_inputs import (
    RunInputs,
    check_runs_without_ray,
    prepare_inputs,
)
from openrlhf.config.cli import save_resolved
from openrlhf.config.generation import GenerationRunConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.tokenized import write_bad_rows
from openrlhf.distributed.checkpoints import RunCheckpoints, export_final, exporting_anyway
from openrlhf.distributed.collectives import naming_lost_ranks
from openrlhf.distributed.folders import holding_folders
from openrlhf.distributed.hub import open_repository, push
from openrlhf.engines.base import RolloutEngine
from openrlhf.errors import ConfigError, LostRankError
from openrlhf.models.loading import say_padded
from openrlhf.models.support import check_here
from openrlhf.report.report import reporting
from openrlhf.rewards.base import RewardSource
from openrlhf.rollout.agents.episodes import agent_rollout_maker, agent_setup
from openrlhf.rollout.engine_pool import BatchedEngine, EnginePool, SamplingEngine
from openrlhf.rollout.rollout import RolloutMaker
from openrlhf.rollout.scoring import FailurePolicy, GroupScorer, Scorer, SourceScorer
from openrlhf.trainer.device_phases import DevicePhases
from openrlhf.trainer.local_cluster import Cluster, local_cluster
from openrlhf.trainer.ppo_state import RunState, open_run
from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.trainer.ppo_trainer_async import PPOTrainerAsync
from openrlhf.trainer.ppo_utils.demands import TRAINED_ROLES, pools_of, sharing_one_machine
from openrlhf.trainer.ppo_utils.model_scorer import ModelScorer
from openrlhf.trainer.ppo_utils.worker_group import Forward, WorkerGroup, start_forward
from openrlhf.trainer.workers.critic_and_frozen import (
    CriticModelActor,
    ReferenceModelActor,
    RewardModelActor,
)
from openrlhf.trainer.workers.model_worker import ModelWorker, TrainedWorker
from openrlhf.trainer.workers.policy import PolicyModelActor
from openrlhf.utils import stopping
from openrlhf.utils.console import format_count, notice, print_banner
from openrlhf.utils.framework_logs import redirect_framework_logs
from openrlhf.utils.outcome import say_saved
from openrlhf.utils.progress import progress, saying_what_is_awaited
from openrlhf.utils.run_folder import BAD_ROWS_FILE, CONFIG_FILE
from openrlhf.utils.tensors import dtype_name
from openrlhf.utils.tracker import make_tracker

Groups = Mapping[str, WorkerGroup]  # by role
OpenCluster = Callable[..., AbstractContextManager[Cluster]]
MakeTrainer = Callable[..., PPOTrainer]


def run_ppo_ray(
    config: PPOConfig,
    make_trainer: MakeTrainer | None = None,
    *,
    reward_source: RewardSource | None = None,
) -> None:
    """Train on a Ray cluster: the one there is, else one started on this machine.

    A program may bring its own trainer, and the rewards that the config does not name a source of.
    """
    config = placed(config)
    inputs = prepare_inputs(
        config, has_engines=config.vllm.num_engines != 0, reward_source=reward_source
    )
    _open_and_run(config, inputs, opener(on_ray=True), make_trainer)


def placed(config: PPOConfig) -> PPOConfig:
    """Return the config with a place for models and engines, where nobody gave them one."""
    return sharing_one_machine(config, parts_on_ray().view_of_run)


def run_ppo_local(
    config: PPOConfig,
    make_trainer: MakeTrainer | None = None,
    *,
    reward_source: RewardSource | None = None,
) -> None:
    """Train in this process, without Ray; with its own parts as `run_ppo_ray`."""
    check_runs_without_ray(config)
    check_here(config.ds)  # on Ray each worker looks at its own machine
    inputs = prepare_inputs(
        config, has_engines=bool(config.vllm.num_engines), reward_source=reward_source
    )
    _open_and_run(config, inputs, opener(on_ray=False), make_trainer)


def opener(*, on_ray: bool) -> OpenCluster:
    """Return the context that opens the cluster of a run: on Ray, or in this process, which needs
    no Ray.
    """
    if not on_ray:
        return local_cluster
    ray_cluster: OpenCluster = parts_on_ray().ray_cluster
    return ray_cluster


def parts_on_ray() -> ModuleType:
    """Return openrlhf.trainer.ray.cluster, which only a run on Ray imports; raise ConfigError where
    Ray is not installed.
    """
    try:
        from openrlhf.trainer.ray import cluster  # noqa: PLC0415 - no other run needs Ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "This runs on Ray, which is not installed. Type pip install 'ray[default]>=2.60,<3' or "
            "openrlhf ppo-local; for an evaluation, leave --vllm_num_engines out."
        ) from error
    return cluster


def _open_and_run(
    config: PPOConfig,
    inputs: RunInputs,
    open_cluster: OpenCluster,
    make_trainer: MakeTrainer | None,
) -> None:
    source = inputs.reward_source
    closed = closing(source) if source else nullcontext()
    with closed, holding_folders(config.ckpt):
        redirect_framework_logs(inputs.run_dir, "driver")
        if config.ckpt.push_to_hub:  # what is wrong there is known before training
            open_repository(config.ckpt.push_to_hub)
        checkpoints = open_run(config, inputs)
        if checkpoints.is_done(inputs.run_dir):
            return
        say_padded(config, config.named_models)
        with (
            reporting(config, is_resumed=checkpoints.saved is not None),
            stopping.explaining_end(checkpoints.how_to_go_on),
            open_cluster(
                config,
                worker_classes(config),
                run_dir=str(inputs.run_dir.resolve()),
                resume_step=checkpoints.resume_step or 0,
            ) as cluster,
        ):
            make = make_trainer or trainer_class(config)
            trainer = _run(config, inputs, cluster, checkpoints, make)
        trainer.say_evaluations()  # a policy that got worse is the last line


def trainer_class(config: PPOConfig) -> type[PPOTrainer]:
    """Return the trainer of a run."""
    return PPOTrainerAsync if config.train.async_enable else PPOTrainer


def _run(
    config: PPOConfig,
    inputs: RunInputs,
    cluster: Cluster,
    checkpoints: RunCheckpoints,
    make_trainer: MakeTrainer,
) -> PPOTrainer:
    groups, phases = cluster.groups, phases_of(config, cluster.engines)
    state = RunState(config, checkpoints, groups, phases)
    state.check_is_shared()
    phases.sleep()
    sizes = init_models(config, groups, inputs.updates, phases)
    state.check_room()
    print_banner(banner_sections(config, inputs, cluster, sizes))
    if config.ds.lora.rank and cluster.engines and cluster.policy_dtype.itemsize < 4:
        notice(
            "engines hold base and adapter in one, rounded to "
            f"{dtype_name(cluster.policy_dtype)}: changes of a weight below half a step of it do "
            "not reach samples (docs/training.md, Adapters)"
        )
    maker = rollout_maker_of(
        config,
        inputs,
        cluster,
        phases,
        FailurePolicy.of(config.reward, config.rollout.batch_size),
        # Where engines do not pause, models that share their devices cannot wait for a pause.
        never_pauses=config.train.async_enable or config.algo.dynamic_filtering_enable,
    )
    trainer = make_trainer(
        config,
        inputs,
        cluster,
        forwards=forwards_of(config, groups, max(inputs.updates)),
        maker=maker,
        state=state,
        tracker=make_tracker(
            config.logger,
            inputs.run_dir,
            config.model_dump(mode="json"),
            resume_step=checkpoints.resume_step,
        ),
    )
    state.resume()
    # What is refused leaves the folder as it was.
    checkpoints.clear_folder(inputs.run_dir, config)
    if checkpoints.resume_step is not None:
        trainer.tracker.rewind(checkpoints.resume_step)
    save_resolved(config, inputs.run_dir / CONFIG_FILE)
    data_sets = (inputs.prompts, inputs.eval_prompts, inputs.texts)
    write_bad_rows(inputs.run_dir / BAD_ROWS_FILE, *data_sets)
    fit_and_export(trainer, partial(_export, config, groups), config.ckpt.grace_s)
    checkpoints.note_finished(inputs.run_dir, state.global_step)
    say_saved(inputs.run_dir)
    if config.ckpt.push_to_hub:
        push(inputs.run_dir, config.ckpt.push_to_hub)
    for callback in trainer.callbacks:
        callback.on_save(trainer, state.global_step, inputs.run_dir)
    return trainer


def fit_and_export(trainer: PPOTrainer, export: Callable[[], None], grace_s: float) -> None:
    """Train and export; go on from the last checkpoint where a rank is lost meanwhile."""
    lost: LostRankError | None = None
    is_exported = False
    while not is_exported:
        with (
            exporting_anyway(export, trainer.inputs.run_dir),
            stopping.patiently(grace_s),
            trainer.state.checkpoints.finishing(),
            naming_lost_ranks(),
        ):
            trainer.fit(lost)
        try:
            export()
            is_exported = True
        except LostRankError as error:
            lost = error


def phases_of(config: PPOConfig, engines: Sequence[RolloutEngine]) -> DevicePhases:
    """Return who holds device memory in which phase."""
    engines_sleep = config.vllm.enable_sleep and config.engines_share_devices
    takes_turns = config.rewards_take_turns or config.engines_share_devices
    return DevicePhases(
        engines,
        engines_sleep=engines_sleep,
        training_sleeps=config.ds.enable_sleep,
        # One at a time where reward models and what is trained share devices and run side by side,
        # or where a new engine starts on devices that training computes on.
        device_lock=threading.RLock() if takes_turns else nullcontext(),
    )


def _export(config: PPOConfig, groups: Groups) -> None:
    # Workers elsewhere may have another working directory.
    folders = {"actor": os.path.abspath(config.ckpt.output_dir)}
    if "critic" in groups and config.critic.save_value_network:
        folders["critic"] = f"{folders['actor']}_critic"
    for role, folder in folders.items():
        with saying_what_is_awaited(f"{role} to write its model to {folder}"):
            export_final(partial(groups[role].call, TrainedWorker.export), Path(folder))


def worker_classes(config: PPOConfig) -> dict[str, type]:
    """Return the class of the ranks of every role that a run has."""
    classes: dict[str, type] = {"actor": PolicyModelActor}
    if config.has_reference:
        classes["ref"] = ReferenceModelActor
    classes |= dict.fromkeys(config.reward_roles, RewardModelActor)
    if config.has_critic:
        classes["critic"] = CriticModelActor
    return classes


def init_models(
    config: PPOConfig, groups: Groups, updates: Sequence[int], phases: DevicePhases
) -> dict[str, int]:
    """Load all models and return their parameter counts by role.

    Roles that share devices load one after another, the others at the same time.
    """
    num_frozen = max(config.critic.freezing_steps, 0) if config.has_critic else 0
    args: dict[str, tuple[object, ...]] = {
        "actor": (max(sum(updates[num_frozen:]), 1),),
        "critic": (sum(updates),),
        **{role: (path,) for role, path in config.reward_roles.items()},
    }
    pools: dict[str, list[str]] = {}
    for role, pool in pools_of(config, groups).items():
        pools.setdefault(pool, []).append(role)
    sizes = {}
    with progress("getting models ready", len(groups)) as advance:
        for wave in zip_longest(*pools.values()):
            pending = {}
            for role in filter(None, wave):
                group = groups[role]
                group.model_args = args.get(role, ())
                shares = [group.model_args] * group.num_shares
                pending[role] = group.start(ModelWorker.init_model, shares)
            for role, wait in pending.items():
                try:
                    with saying_what_is_awaited(f"{role} to load its model: see its log"):
                        sizes[role] = wait()[0]
                except LostRankError as why:
                    sizes[role] = groups[role].start_again(why)
                if role in TRAINED_ROLES:
                    phases.put_away(groups[role])
                advance()
    return sizes


def forwards_of(config: PPOConfig, groups: Groups, updates_per_rollout: int) -> dict[str, Forward]:
    """Return the forwards that a run needs, by the column that each gives.

    Old log-probs are needed for off-policy updates, and for a KL in the reward.
    """
    methods: dict[str, tuple[str, Callable[..., Tensor]]] = {
        "old_logprobs": ("actor", PolicyModelActor.compute_logprobs),
        "values": ("critic", CriticModelActor.compute_values),
        "ref_logprobs": ("ref", ReferenceModelActor.compute_logprobs),
    }
    has_reward_kl = config.has_reference and not config.algo.kl.use_loss
    if updates_per_rollout == 1 and not has_reward_kl:
        del methods["old_logprobs"]
    return {
        name: partial(start_forward, groups[role], method)
        for name, (role, method) in methods.items()
        if role in groups
    }


def rollout_maker_of(
    config: GenerationRunConfig,
    inputs: RunInputs,
    cluster: Cluster,
    phases: DevicePhases,
    policy: FailurePolicy,
    *,
    never_pauses: bool = False,
) -> RolloutMaker:
    """Return the maker of scored rollouts: engines and rewards, or agents that use the engines."""
    groups = cluster.groups
    engines: Sequence[SamplingEngine] = list(cluster.engines) or [
        BatchedEngine(partial(groups["actor"].divide, PolicyModelActor.generate))
    ]
    if config.train.agent_func_path:
        setup = agent_setup(
            config,
            inputs.tokenizer,
            vocab_size=inputs.vocab_size,
            image_processor=inputs.image_processor,
        )
        return agent_rollout_maker(setup, engines, policy)
    if inputs.reward_source is not None:
        batch_size, num_steps = config.rollout.micro_batch_size, len(inputs.updates)
        scorer: Scorer = SourceScorer(
            inputs.reward_source,
            batch_size,
            max_steps=num_steps,
            reads_images=inputs.image_processor is not None,
        )
    else:
        has_own_devices = cluster.view is not None and not config.colocates_all
        scorer = ModelScorer(
            {
                name: partial(start_forward, groups[role], RewardModelActor.compute_rewards)
                for name, role in zip(config.reward.model_names, config.reward_roles, strict=True)
            },
            config.reward.weights,
            in_turn=config.colocates_all,
            is_streaming=has_own_devices or never_pauses,
            device_lock=phases.device_lock,
        )
    may_mix = config.mixes_versions
    pool = EnginePool(engines, inputs.tokenizer, vocab_size=inputs.vocab_size, may_mix=may_mix)
    return RolloutMaker(pool, GroupScorer(scorer, policy))


def banner_sections(
    config: PPOConfig, inputs: RunInputs, cluster: Cluster, sizes: Mapping[str, int]
) -> dict[str, Mapping[str, object]]:
    """Return the lines a run opens with; `sizes` are parameter counts by role."""
    updates, num_prompts, held_out = inputs.updates, len(inputs.prompts), inputs.eval_prompts
    view, train, rollout, reward = cluster.view, config.train, config.rollout, config.reward
    demands = {demand.role: demand for demand in cluster.demands}
    # Roles of one pool share devices; without Ray there are no pools.
    pools = {role: f", devices: {demand.pool}" if view else "" for role, demand in demands.items()}
    paths = {"critic": config.critic_source, **config.reward_roles}
    models = {
        role: f"{paths.get(role, config.policy_path)}: {format_count(size)} parameters, "
        f"{demands[role].num_ranks} rank(s){pools[role]}"
        for role, size in sizes.items()
    }
    models["generation"] = "the actor itself"
    if "vllm" in demands:
        width, num_engines = config.vllm.tensor_parallel_size, demands["vllm"].num_ranks
        engines = f"{num_engines} x vLLM of {width} device(s) each"
        models["generation"] = engines + pools["vllm"]
    replaces = config.algo.dynamic_filtering_enable
    num_all = num_prompts * (train.num_episodes if replaces or train.async_enable else 1)
    num_drawn = min(rollout.batch_size, num_all)
    num_samples = num_drawn * rollout.n_samples_per_prompt
    left = num_samples % train.batch_size if num_samples > train.batch_size else 0
    run = {
        "estimator": config.algo.advantage.estimator,
        "reward": train.agent_func_path or reward.remote_url or ", ".join(reward.model_paths),
        "devices": f"{view.num_gpus} GPU(s), {view.num_cpus} core(s)" if view else "this process",
        "dtype": dtype_name(cluster.policy_dtype),
        "batch": f"{num_drawn} prompts x {rollout.n_samples_per_prompt} samples = "
        f"{num_samples}; {max(updates)} update(s) of "
        f"{min(train.batch_size, num_samples)} samples a step"
        + (f", the last of {left}" if left else ""),
        "steps": f"{'at most ' if replaces else ''}{len(updates)} "
        f"({num_prompts} prompts x {train.num_episodes} episode(s))",
        "evaluation": "none"
        if held_out is None
        else f"{len(held_out)} prompts x {inputs.eval_sampling.num_samples} samples",
        "folder": config.ckpt.output_dir,
    }
    return {"models": models, "run": run}
