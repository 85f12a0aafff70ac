"""`openrlhf check`: all that a training run finds out before it computes; nothing is computed.

The checks are those of the run itself. Then it says what would be trained: batches, who runs where,
memory and disk, two rows as the model reads them, and two through the reward.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from openrlhf.config.base import Caution, with_value
from openrlhf.config.common import OptimizerConfig, RunConfig
from openrlhf.config.local_paths import named_things
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import DPOConfig, KDConfig, KTOConfig, RMConfig, SupervisedConfig
from openrlhf.distributed import folders
from openrlhf.distributed.checkpoints import DataFacts, RunCheckpoints
from openrlhf.distributed.export import check_room, free_bytes
from openrlhf.distributed.strategy import DeepSpeedStrategy, effective_stage, training_config
from openrlhf.distributed.topology import Topology
from openrlhf.engines.vllm_cpu import cache_bytes
from openrlhf.errors import ConfigError, Gathered
from openrlhf.models.loading import say_padded
from openrlhf.models.support import check_here
from openrlhf.trainer import supervised_run
from openrlhf.trainer.base_trainer import Inputs
from openrlhf.trainer.check_memory import (
    PROCESS,
    Model,
    Shape,
    Share,
    cache_bytes_per_token,
    facts_of,
    in_words,
    peaks_of,
    shape_of,
    share_of,
)
from openrlhf.trainer.check_rows import say_rows, try_rewards
from openrlhf.trainer.ppo_run import banner_sections, worker_classes
from openrlhf.trainer.ppo_setup import (
    RunInputs,
    check_runs_without_ray,
    named_models,
    prepare_inputs,
)
from openrlhf.trainer.ray.cluster import MAX_NUM_SEQS, Cluster, local_demands
from openrlhf.trainer.ray.launcher import find_cluster, ray_session
from openrlhf.trainer.ray.placement import (
    TRAINED_ROLES,
    ClusterView,
    RoleDemand,
    check_demand,
    demand_table,
    reward_roles,
    role_demands,
    view_cluster,
)
from openrlhf.trainer.supervised_run import Recipe
from openrlhf.utils.gpus import visible_gpus
from openrlhf.utils.logging import notice, print_banner, say_notices

REWARD_S = 30.0  # for the rewards of two rows
# What to type where memory is short.
LESS = (
    "--zero_stage 3, --adam_offload, --lora_rank 16 or a smaller --vllm_gpu_memory_utilization, or "
    "give it more ranks"
)
LESS_WORK = "a smaller --micro_train_batch_size, or --gradient_checkpointing"


def check_supervised(recipe: Recipe, config: SupervisedConfig, said: Sequence[str]) -> None:
    """Check a supervised run; `said` are the problems of its command line. Raise ConfigError that
    lists all problems.
    """
    topology = Topology.from_env(local_rank=config.local_rank)
    if not topology.is_main:
        return
    with gathering(config, said) as gathered:
        gathered.attempt(partial(DeepSpeedStrategy.of, config))
        inputs = gathered.attempt(partial(supervised_run.prepare_inputs, recipe, config))
        if inputs is not None:
            supervised_run.say_inputs(recipe, config, inputs)
            _check_saved(config, inputs.samples, gathered)
        models = _supervised_models(recipe, config, inputs, topology.world_size)
        has_gpus = torch.cuda.is_available()
        shapes = _shapes(config, models, gathered, has_gpus=has_gpus)
        if (shape := shapes.get("model")) is not None:
            facts = facts_of(shape, models["model"], config.ds)
            gathered.attempt(partial(training_config, config.ds, config, facts))
            if inputs is not None:
                sections = supervised_run.banner_sections(
                    config,
                    inputs,
                    list(shape.module.parameters()),
                    stage=effective_stage(config.ds, facts),
                    ranks=f"{topology.world_size} on {'cuda' if has_gpus else 'cpu'}",
                )
                print_banner(sections)
            _check_memory(config, models, shapes, gathered, has_gpus=has_gpus)
            _check_disk(config, shape, [shape], gathered)
        if inputs is not None:
            say_rows(inputs.samples, inputs.tokenizer)


def check_ppo_ray(config: PPOConfig, said: Sequence[str]) -> None:
    """Check an RL run on Ray, as `check_supervised` does: on the cluster there is, or on this
    machine.
    """
    with gathering(config, said) as gathered:
        view = gathered.attempt(_view_of_run)
        if view is not None:
            gathered.attempt(partial(check_here, config.ds, is_cuda=view.has_gpus or None))
        demands = view and gathered.attempt(partial(_placed, config, view))
        _check_ppo(config, gathered, view, demands, has_engines=config.vllm.num_engines != 0)


def check_ppo_local(config: PPOConfig, said: Sequence[str]) -> None:
    """Check an RL run in this process, as `check_supervised` does."""
    with gathering(config, said) as gathered:
        gathered.attempt(partial(check_runs_without_ray, config))
        gathered.attempt(partial(check_here, config.ds))
        demands = local_demands(config, worker_classes(config))
        _check_ppo(config, gathered, None, demands, has_engines=bool(config.vllm.num_engines))


def _check_ppo(
    config: PPOConfig,
    gathered: Gathered,
    view: ClusterView | None,
    demands: Sequence[RoleDemand] | None,
    *,
    has_engines: bool,
) -> None:
    has_gpus = torch.cuda.is_available() if view is None else view.has_gpus
    with tempfile.TemporaryDirectory() as folder:  # for what the reward function prints
        trial = with_value(config, "ckpt.output_dir", folder)
        trial = with_value(trial, "reward.timeout_s", min(config.reward.timeout_s, REWARD_S))
        inputs = gathered.attempt(partial(prepare_inputs, trial, has_engines=has_engines))
        source = inputs and inputs.reward_source
        with closing(source) if source else nullcontext():
            if inputs is not None:
                say_padded(config, named_models(config))
                _check_saved(config, inputs.prompts, gathered)
            if demands is not None:
                _check_models(config, inputs, gathered, view, demands, has_gpus=has_gpus)
            if inputs is not None:
                say_rows(inputs.prompts, inputs.tokenizer)
                if inputs.texts is not None:
                    say_rows(inputs.texts, inputs.tokenizer)
                gathered.problems += try_rewards(config, inputs)


def _check_models(
    config: PPOConfig,
    inputs: RunInputs | None,
    gathered: Gathered,
    view: ClusterView | None,
    demands: Sequence[RoleDemand],
    *,
    has_gpus: bool,
) -> None:
    models = _ppo_models(config, inputs, demands)
    shapes = _shapes(config, models, gathered, has_gpus=has_gpus)
    if (policy := shapes.get("actor")) is None:
        return
    trained = {role: shapes[role] for role in TRAINED_ROLES if role in shapes}
    optims: dict[str, OptimizerConfig] = {"actor": config.actor, "critic": config.critic}
    for role, shape in trained.items():
        facts = facts_of(shape, models[role], config.ds)
        gathered.attempt(partial(training_config, config.ds, optims[role], facts))
    if inputs is not None:
        cluster = Cluster(demands, view, policy.dtype, {}, ())
        sizes = {role: shape.num_parameters for role, shape in shapes.items()}
        num_prompts = len(inputs.prompts)
        print_banner(banner_sections(config, inputs.updates, cluster, sizes, num_prompts))
    if view is not None and has_gpus:
        notice(f"placement\n{demand_table(demands, view)}")
    _check_memory(config, models, shapes, gathered, has_gpus=has_gpus, demands=demands)
    _check_disk(config, policy, list(trained.values()), gathered)


@contextmanager
def gathering(config: RunConfig, said: Sequence[str]) -> Iterator[Gathered]:
    """Gather problems in the block, behind those that are `said`; at its end raise ConfigError that
    lists all, without those that only follow from a file that is missing.
    """
    gathered = Gathered()
    gathered.problems += said
    for place, flag in ((config.ckpt.output_dir, "--save_path"), (config.ckpt.path, "--ckpt_path")):
        is_used = flag == "--save_path" or config.ckpt.uses_root
        if is_used and os.path.isdir(place) and os.access(place, os.W_OK):
            gathered.attempt(partial(_check_is_free, Path(place), flag))
    yield gathered
    missing = [
        name
        for option, _, names in named_things(config)
        for name in names
        if any(line.startswith(f"{option.flag} {name} ") for line in said)
    ]
    found = [line for line in gathered.problems if not any(name in line for name in missing)]
    if problems := [*said, *found]:
        raise ConfigError(list(dict.fromkeys(problems)))
    notice("\nno problem was found")


def _check_is_free(folder: Path, flag: str) -> None:
    with folders.holding(folder, flag):
        pass


def _check_saved(config: RunConfig, samples: Any, gathered: Gathered) -> None:
    """Note what forbids to go on from the checkpoint that is there."""
    facts = DataFacts(samples.fingerprint, len(samples))
    gathered.attempt(lambda: RunCheckpoints(config.ckpt, facts).find_saved(config))


def _view_of_run() -> ClusterView:
    """Return the devices of the cluster that a run would join, or of this machine, on which it
    would start its own.
    """
    asked = os.environ.get("RAY_ADDRESS")
    if asked != "local" and find_cluster(asked) is not None:
        with ray_session():
            return view_cluster()
    num_gpus = len(visible_gpus())
    return ClusterView(num_gpus, os.cpu_count() or 1, num_gpus)


def _placed(config: PPOConfig, view: ClusterView) -> list[RoleDemand]:
    demands = role_demands(config, view)
    check_demand(demands, view)
    return demands


def _supervised_models(
    recipe: Recipe, config: SupervisedConfig, inputs: Inputs | None, num_ranks: int
) -> dict[str, Model]:
    """Return the models of a run, the trained one as "model"."""
    path, train = config.model.model_name_or_path or "", config.train
    num_tokens = train.micro_batch_size * config.data.max_len
    if inputs is not None:  # the longest rows that can meet
        num_rows = min(train.micro_batch_size, len(inputs.samples))
        num_tokens = int(inputs.samples.lengths.topk(num_rows).values.sum())
    num_tokens = num_tokens if train.token_budget is None else train.token_budget
    others, offload = list(recipe.other_models(config)), False
    match config:
        case DPOConfig() | KTOConfig():
            has_reference = not isinstance(config, DPOConfig) or config.has_reference
            if has_reference and not others and not config.ds.lora.rank:
                others = [path]  # an adapter's base is a reference by itself
            offload = config.ref.offload
        case KDConfig():
            offload = config.teacher.offload
    size: dict[str, Any] = {"num_ranks": num_ranks, "num_tokens": num_tokens}
    recomputes, scores = config.model.gradient_checkpointing_enable, isinstance(config, RMConfig)
    trained = Model(path, trains=True, scores=scores, recomputes=recomputes, **size)
    frozen = {f"frozen {name}": Model(name, offload=offload, **size) for name in others}
    return {"model": trained, **frozen}


def _ppo_models(
    config: PPOConfig, inputs: RunInputs | None, demands: Sequence[RoleDemand]
) -> dict[str, Model]:
    """Return the models of a run by role."""
    train, rollout = config.train, config.rollout
    longest = config.data.prompt_max_len if inputs is None else int(inputs.prompts.lengths.max())
    length = longest + rollout.max_new_tokens
    asked = rollout.max_tokens_per_gpu or train.max_tokens_per_gpu
    num_asked = asked if train.dynamic_batch_enable else rollout.micro_batch_size * length
    num_trained = train.token_budget or train.micro_batch_size * length
    rewards, models = reward_roles(config), dict[str, Model]()
    for demand in demands:
        role, trains = demand.role, demand.role in TRAINED_ROLES
        if role == "vllm":
            continue
        path = {"critic": config.critic_source, **rewards}.get(role) or config.policy_path
        section: Any = getattr(config, "reward" if role in rewards else role)
        models[role] = Model(
            path,
            trains=trains,
            scores=role == "critic" or role in rewards,
            recomputes=trains and section.gradient_checkpointing_enable,
            offload=not trains and section.offload,
            num_ranks=demand.num_ranks,
            num_tokens=num_trained if trains else num_asked,
            pool=demand.pool,
        )
    return models


def _shapes(
    config: SupervisedConfig | PPOConfig,
    models: Mapping[str, Model],
    gathered: Gathered,
    *,
    has_gpus: bool,
) -> dict[str, Shape]:
    """Return the models whose sizes can be known; say which cannot."""
    shapes = {}
    for role, model in models.items():
        try:
            make = partial(shape_of, model, config, config.ds, is_cuda=has_gpus)
            if (shape := gathered.attempt(make)) is not None:
                shapes[role] = shape
        except ValueError as error:  # of code that comes with weights
            notice(f"the memory of {model.path} is not known: {error}")
    return shapes


def _check_memory(
    config: SupervisedConfig | PPOConfig,
    models: Mapping[str, Model],
    shapes: Mapping[str, Shape],
    gathered: Gathered,
    *,
    has_gpus: bool,
    demands: Sequence[RoleDemand] = (),
) -> None:
    """Say what models and engines take of each device; note what cannot fit."""
    shares = {role: share_of(shape, models[role], config.ds) for role, shape in shapes.items()}
    lines = {role: _share_text(share, models[role]) for role, share in shares.items()}
    have = _device_bytes(has_gpus=has_gpus)
    engine = _engine_bytes(config, shapes, demands, have, has_gpus=has_gpus)
    if engine:
        lines["vllm"] = f"{in_words(engine)} weights and cache"
    elif any(demand.role == "vllm" for demand in demands) and isinstance(config, PPOConfig):
        lines["vllm"] = f"{config.vllm.gpu_memory_utilization:.0%} of its GPU"
    pools: dict[str, list[str]] = {}
    for role in shares:
        pools.setdefault(models[role].pool if has_gpus else "", []).append(role)
    engine_pool = next((demand.pool for demand in demands if demand.role == "vllm"), "")
    for pool, roles in pools.items():
        counts = [1 if has_gpus else models[role].num_ranks for role in roles]
        parts = [shares[role].times(n) for role, n in zip(roles, counts, strict=True)]
        is_here = not has_gpus or pool == engine_pool
        sleeps = has_gpus and isinstance(config, PPOConfig)
        certain, peak = peaks_of(
            parts,
            engine=engine if is_here else 0.0,
            engine_sleeps=sleeps and config.vllm.enable_sleep and config.engines_share_devices,
            states_sleep=sleeps and config.ds.enable_sleep,
        )
        num_processes = sum(counts) if isinstance(config, PPOConfig) else max(counts)
        peak += PROCESS * num_processes
        place = "this machine" if not has_gpus else f"a GPU of {pool}" if pool else "a GPU"
        lines[place] = f"{in_words(peak)} at most, with {num_processes} process(es)"
        if have is not None:
            lines[place] += f"; {in_words(have)} are there"
            gathered.attempt(partial(_judge, place, certain, peak, have))
    print_banner({"memory of each rank, about": lines})


def _judge(place: str, certain: float, peak: float, have: float) -> None:
    """Raise ConfigError if weights and states cannot fit; warn if micro-batches may not."""
    if certain > have:
        raise ConfigError(
            f"memory of {place}: {in_words(certain)} of weights, optimizer states and engines do "
            f"not fit into {in_words(have)}. Type {LESS}."
        )
    if peak > have:
        told = f"memory of {place}: about {in_words(peak)} of {in_words(have)}. Type {LESS_WORK}"
        say_notices([Caution(told)])


def _share_text(share: Share, model: Model) -> str:
    parts = {
        "weights": share.weights,
        "gradients and optimizer": share.states,
        f"micro-batch of {model.num_tokens:,} tokens": share.work,
        "offloaded": share.host,
    }
    told = " + ".join(f"{in_words(size)} {what}" for what, size in parts.items() if size)
    return f"{told}, on each of {model.num_ranks} ranks" if model.num_ranks > 1 else told


def _device_bytes(*, has_gpus: bool) -> float | None:
    """Return the memory of a device; None for GPUs of other machines."""
    if not has_gpus:
        return float(psutil.virtual_memory().available)
    is_here = torch.cuda.is_available()
    return float(torch.cuda.get_device_properties(0).total_memory) if is_here else None


def _engine_bytes(
    config: SupervisedConfig | PPOConfig,
    shapes: Mapping[str, Shape],
    demands: Sequence[RoleDemand],
    have: float | None,
    *,
    has_gpus: bool,
) -> float:
    """Return what an engine takes of its GPU, or all engines of this machine's memory."""
    num_engines = sum(demand.num_ranks for demand in demands if demand.role == "vllm")
    if not num_engines or not isinstance(config, PPOConfig):
        return 0.0
    if has_gpus:
        return config.vllm.gpu_memory_utilization * (have or 0.0)
    policy, data = shapes["actor"], config.data
    cache = cache_bytes(
        cache_bytes_per_token(policy),
        max_len=data.max_len or data.prompt_max_len + config.rollout.max_new_tokens,
        num_seqs=MAX_NUM_SEQS,
    )
    return num_engines * (policy.num_parameters * policy.dtype.itemsize + cache)


def _check_disk(
    config: SupervisedConfig | PPOConfig,
    exported: Shape,
    trained: Sequence[Shape],
    gathered: Gathered,
) -> None:
    """Say what is written and where; note a model that has no room."""
    ckpt, has_average = config.ckpt, isinstance(config, PPOConfig) and config.train.enable_ema
    folder = Path(ckpt.output_dir)
    num_copies = 2 if has_average else 1
    gathered.attempt(partial(check_room, exported.module, folder, num_copies=num_copies))
    size = num_copies * exported.num_trained * exported.dtype.itemsize
    lines = {"model": f"{in_words(size)} in {folder}; {in_words(free_bytes(folder))} are free"}
    if ckpt.save_steps > 0:
        states = 0 if ckpt.disable_ds else sum(3 * 4 * shape.num_trained for shape in trained)
        each = states + (size if ckpt.save_hf else 0)
        free, count = free_bytes(Path(ckpt.path)), ckpt.max_num + 1  # a new one beside the old
        told = f"{ckpt.max_num} of {in_words(each)} in {ckpt.path}; {in_words(free)} are free"
        lines["checkpoints"] = told
        if count * each > free:
            need = f"--ckpt_path {ckpt.path}: {count} checkpoints take {in_words(count * each)}"
            remedy = "Type a smaller --max_ckpt_num, or make room"
            say_notices([Caution(f"{need}, and {in_words(free)} are free. {remedy}")])
    print_banner({"disk": lines})
