"""`openrlhf check`: all that a run finds out before it computes. Nothing is generated or
trained; reward models that have room score two rows.

The checks are those of the run itself. Then it says what would be trained: batches, who runs where,
memory and disk, two rows as the model reads them, and two through the reward.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from openrlhf.commands import evaluate, train_rl, train_supervised
from openrlhf.commands.check_memory import (
    PROCESS,
    Model,
    Shape,
    cache_bytes_per_token,
    model_size_of,
    peaks_of,
    shape_of,
    share_of,
)
from openrlhf.commands.check_rows import say_rows, try_rewards
from openrlhf.commands.rl_inputs import RunInputs, check_runs_without_ray, gather_inputs
from openrlhf.commands.train_supervised import Recipe
from openrlhf.config.base import UNNAMED, with_value
from openrlhf.config.common import RunConfig, TrainConfig, TrainedModelConfig, TrainingRunConfig
from openrlhf.config.evaluation import EvaluateConfig
from openrlhf.config.generation import FrozenConfig, GenerationRunConfig
from openrlhf.config.local_paths import OUTPUTS, named_things
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.distributed import folders
from openrlhf.distributed.checkpoints import DataIdentity, RunCheckpoints
from openrlhf.distributed.export import check_room
from openrlhf.distributed.folders import free_bytes, free_memory, has_room
from openrlhf.distributed.strategy import DeepSpeedStrategy, effective_stage, training_config
from openrlhf.distributed.topology import Topology
from openrlhf.engines.vllm_cpu import cache_bytes
from openrlhf.errors import ConfigError, Gathered
from openrlhf.models.loading import resolve_dtype, say_padded
from openrlhf.models.support import check_here
from openrlhf.trainer.base_trainer import Inputs
from openrlhf.trainer.local_cluster import MAX_NUM_SEQS, Cluster, local_demands
from openrlhf.trainer.ppo_utils.demands import (
    ClusterView,
    RoleDemand,
    check_demand,
    demand_table,
    role_demands,
)
from openrlhf.utils.console import notice, print_banner, warn
from openrlhf.utils.images import is_vision
from openrlhf.utils.memory import human_size

ROOM = 0.8  # of the free memory, for the weights of reward models
REWARD_S = 30.0  # for the rewards of two rows
TRAINED = "model"  # the role of the trained model of a supervised run


def check_supervised(
    recipe: Recipe, config: SupervisedConfig, known_problems: Sequence[str]
) -> None:
    """Check a supervised run. Raise ConfigError that lists all problems, first the
    `known_problems` of its command line.
    """
    topology = Topology.from_env(local_rank=config.local_rank)
    if not topology.is_main:
        return
    with gathering(config, known_problems) as gathered:
        with gathered:
            DeepSpeedStrategy.of(config)
        inputs = None
        with gathered:
            inputs = train_supervised.prepare_inputs(recipe, config)
        has_gpus, num_ranks = torch.cuda.is_available(), topology.world_size
        models = _supervised_models(recipe, config, inputs, num_ranks)
        plan = Plan(config, models, gathered, has_gpus=has_gpus)
        if inputs is not None:
            train_supervised.say_inputs(recipe, config, inputs)
            _check_saved(config, inputs.data, gathered)
            if (shape := plan.shapes.get(TRAINED)) is not None:
                sections = train_supervised.banner_sections(
                    config,
                    inputs,
                    list(shape.module.parameters()),
                    stage=effective_stage(
                        config.ds, model_size_of(shape, models[TRAINED], config.ds)
                    ),
                    ranks=f"{num_ranks} on {'cuda' if has_gpus else 'cpu'}",
                )
                print_banner(sections)
        plan.check()
        if inputs is not None:
            say_rows(inputs.samples, inputs.tokenizer)


def check_ppo_ray(config: PPOConfig, known_problems: Sequence[str]) -> None:
    """Check an RL run on Ray, as `check_supervised` does: on the cluster there is, or on this
    machine.
    """
    with gathering(config, known_problems) as gathered:
        with gathered:
            config = train_rl.placed(config)
        _check_ppo(config, gathered, on_ray=True)


def check_ppo_local(config: PPOConfig, known_problems: Sequence[str]) -> None:
    """Check an RL run in this process, as `check_supervised` does."""
    with gathering(config, known_problems) as gathered:
        with gathered:
            check_runs_without_ray(config)
        _check_ppo(config, gathered, on_ray=False)


def _check_ppo(config: PPOConfig, gathered: Gathered, *, on_ray: bool) -> None:
    engines = config.vllm.num_engines
    gather = partial(gather_inputs, has_engines=engines != 0 if on_ray else bool(engines))
    classes = train_rl.worker_classes(config)
    _check_rl(config, gathered, gather, classes, _say_training, on_ray=on_ray)


def check_evaluation(config: EvaluateConfig, known_problems: Sequence[str]) -> None:
    """Check the evaluation of every model that is named, as `check_supervised` does."""
    with gathering(config, known_problems) as gathered:
        for run in evaluate.evaluated_runs(config, gathered):
            gather, classes = evaluate.gather_inputs, evaluate.worker_classes(run)
            _check_rl(run, gathered, gather, classes, _say_evaluation, on_ray=run.is_on_ray)


def _check_rl(
    config: GenerationRunConfig,
    gathered: Gathered,
    gather: Callable[[Any, Gathered], RunInputs | None],
    classes: Mapping[str, type],
    say: Callable[["Plan", RunInputs, ClusterView | None], None],
    *,
    on_ray: bool,
) -> None:
    view, demands = None, local_demands(config, classes)
    if on_ray:
        demands = []
        with gathered:
            view = train_rl.parts_on_ray().view_of_run()
            demands = role_demands(config, view)
            check_demand(demands, view)
    has_gpus = torch.cuda.is_available() if view is None else view.has_gpus
    is_cuda = None if view is None else has_gpus or None
    with gathered:
        check_here(config.ds, trains=config.trains, is_cuda=is_cuda)
    folder = tempfile.mkdtemp()  # for what the reward function prints, which a problem may name
    trial = with_value(config, "ckpt.output_dir", folder)
    trial = with_value(trial, "reward.timeout_s", min(config.reward.timeout_s, REWARD_S))
    inputs = gather(trial, gathered)
    source = inputs and inputs.reward_source
    with closing(source) if source else nullcontext():
        if inputs is not None:
            say_padded(config, config.named_models)
        models = _rl_models(config, inputs, demands)
        plan = Plan(config, models, gathered, has_gpus=has_gpus, demands=demands)
        if inputs is not None:
            say(plan, inputs, view)
            if view is not None and view.has_gpus and demands:
                notice(f"placement\n{demand_table(demands, view)}")
        plan.check()
        for data in (inputs.prompts, inputs.eval_prompts, inputs.texts) if inputs else ():
            if data is not None:
                say_rows(data, inputs.tokenizer)
        if inputs is not None:
            has_room = plan.has_room_for(config.reward_roles)
            try_rewards(config, inputs, gathered, has_room=has_room)
    if not gathered.problems:
        shutil.rmtree(folder)


def _say_training(plan: "Plan", inputs: RunInputs, view: ClusterView | None) -> None:
    """Say what would be trained and where; note what forbids to go on from a checkpoint."""
    _check_saved(plan.config, inputs.data, plan.gathered)
    policy = plan.shapes.get("actor")
    if policy is not None and plan.demands:
        cluster = Cluster(plan.demands, view, policy.dtype, {}, ())
        sizes = {role: shape.num_parameters for role, shape in plan.shapes.items()}
        print_banner(train_rl.banner_sections(plan.config, inputs, cluster, sizes))


def _say_evaluation(plan: "Plan", inputs: RunInputs, _: ClusterView | None) -> None:
    """Say what would be evaluated."""
    num_prompts, num_samples = len(inputs.prompts), inputs.sampling.num_samples
    notice(f"\n{plan.config.policy_path}: {num_prompts} prompts x {num_samples} samples")


@contextmanager
def gathering(config: RunConfig, known_problems: Sequence[str]) -> Iterator[Gathered]:
    """Gather problems in the block, after the `known_problems`; at its end raise ConfigError that
    lists all, without those that only follow from what is missing.
    """
    gathered = Gathered()
    gathered.problems += known_problems
    for flag, folder in config.ckpt.folders.items():
        if os.path.isdir(folder) and os.access(folder, os.W_OK):
            with gathered, folders.holding(Path(folder), flag):
                pass
    yield gathered
    missing = [re.escape(UNNAMED)]
    missing += [
        rf"(?<![\w./-]){re.escape(name)}(?![\w/-])"
        for option, opens, names in named_things(config)
        for name in names
        if opens not in OUTPUTS
        and any(line.startswith(f"{option.flag} {name} ") for line in known_problems)
    ]
    follows = re.compile("|".join(missing)).search
    found = [line for line in gathered.problems if not follows(line)]
    if problems := [*known_problems, *found]:
        error = ConfigError(list(dict.fromkeys(problems)))
        raise error.in_user_code("\n".join(dict.fromkeys(gathered.user_tracebacks)))


def _check_saved(config: TrainingRunConfig, data: DataIdentity, gathered: Gathered) -> None:
    """Note what forbids to go on from the checkpoint that is there."""
    with gathered:
        RunCheckpoints(config.ckpt, data).find_saved(config)


def _supervised_models(
    recipe: Recipe, config: SupervisedConfig, inputs: Inputs | None, num_ranks: int
) -> dict[str, Model]:
    """Return the models of a run, the trained one as TRAINED."""
    path, train = config.model.model_name_or_path or "", config.train
    num_tokens = train.micro_batch_size * config.data.max_len
    if inputs is not None:  # the longest rows that can meet
        num_rows = min(train.micro_batch_size, len(inputs.samples))
        lengths = inputs.samples.lengths.topk(num_rows).values
        if config.num_sampled:
            lengths = (lengths + config.num_sampled).clamp(max=config.data.max_len)
        num_tokens = int(lengths.sum())
    num_tokens = num_tokens if train.token_budget is None else train.token_budget
    size: dict[str, Any] = {"num_ranks": num_ranks, "num_tokens": num_tokens}
    recomputes = config.model.gradient_checkpointing_enable
    trained = Model(path, trains=True, scores=recipe.scores, recomputes=recomputes, **size)
    frozen = recipe.other_models(config)
    others = {f"frozen {name}": Model(name, offload=o, **size) for name, o in frozen.items()}
    return {TRAINED: trained, **others}


def _rl_models(
    config: GenerationRunConfig, inputs: RunInputs | None, demands: Sequence[RoleDemand]
) -> dict[str, Model]:
    """Return the models of a run by role."""
    longest = config.data.prompt_max_len if inputs is None else int(inputs.prompts.lengths.max())
    length, train = longest + config.rollout.max_new_tokens, cast(TrainConfig, config.train)
    num_asked = config.scoring_budget or config.rollout.micro_batch_size * length
    rewards, models = config.reward_roles, dict[str, Model]()
    for demand in demands:
        role = demand.role
        if role == "vllm":
            continue
        model = Model(
            {"critic": config.critic_source, **rewards}.get(role) or config.policy_path,
            scores=role == "critic" or role in rewards,
            num_ranks=demand.num_ranks,
            num_tokens=num_asked,
            pool=demand.pool,
        )
        section = config.placed.get(role)
        if isinstance(section, TrainedModelConfig):
            num_tokens = train.token_budget or train.micro_batch_size * length
            recomputes = section.gradient_checkpointing_enable
            model = replace(model, trains=True, recomputes=recomputes, num_tokens=num_tokens)
        elif isinstance(section, FrozenConfig):
            model = replace(model, offload=section.offload)
        models[role] = model
    return models


class Plan:
    """The models of a run without their weights, and what they take of memory and disk."""

    def __init__(
        self,
        config: RunConfig,
        models: Mapping[str, Model],
        gathered: Gathered,
        *,
        has_gpus: bool,
        demands: Sequence[RoleDemand] = (),
    ) -> None:
        self.config: Any = config
        self.gathered, self.has_gpus = gathered, has_gpus
        self.models, self.demands = models, demands
        found = {role: self.shape(model) for role, model in models.items()}
        self.shapes = {role: shape for role, shape in found.items() if shape is not None}
        self.trained = {role: s for role, s in self.shapes.items() if models[role].trains}

    def shape(self, model: Model) -> Shape | None:
        """Return a model whose size can be known, or None and say why."""
        try:
            with self.gathered:
                return shape_of(model, self.config, self.config.ds, is_cuda=self.has_gpus)
        except ValueError as error:  # of code that comes with weights
            notice(f"the memory of {model.path} is not known: {error}")
        return None

    def check(self) -> None:
        """Say what the run takes of each device and of the disk; note what cannot fit, and what
        DeepSpeed refuses.
        """
        config = self.config
        for role, shape in self.trained.items():
            section = config if role == TRAINED else getattr(config, role)
            model_size = model_size_of(shape, self.models[role], config.ds)
            with self.gathered:
                training_config(config.ds, section, model_size)
        self.check_memory()
        if exported := self.trained.get(TRAINED) or self.trained.get("actor"):
            self.check_disk(exported)

    def check_memory(self) -> None:
        """Say what models and engines take of each device; note what cannot fit."""
        config, models = self.config, self.models
        have, lines, pools = self.device_bytes(), dict[str, str](), dict[str, list[str]]()
        shares = {role: share_of(s, models[role], config.ds) for role, s in self.shapes.items()}
        for role, share in shares.items():
            lines[role] = share.in_words(models[role])
            if models[role].trains and is_vision(self.shapes[role].config):
                lines[role] += "; what its tower keeps of images comes on top"
            pools.setdefault(models[role].pool if self.has_gpus else "", []).append(role)
        # Without GPUs what is offloaded is in the same memory.
        on_device = {role: s if self.has_gpus else s.in_one_memory() for role, s in shares.items()}
        engine, sleeps = 0.0, False
        engines = [demand for demand in self.demands if demand.role == "vllm"]
        if engines:
            engine = self.engine_bytes(config, engines[0].num_ranks, have)
            sleeps = config.engines_share_devices and config.vllm.enable_sleep
        if engine:
            lines["vllm"] = f"{human_size(engine)} weights and cache"
            pools.setdefault(engines[0].pool if self.has_gpus else "", [])
        elif engines and self.has_gpus:
            lines["vllm"] = f"{config.vllm.gpu_memory_utilization:.0%} of its GPU"
        for pool, roles in pools.items():
            counts = [1 if self.has_gpus else models[role].num_ranks for role in roles]
            has_engine = not self.has_gpus or any(demand.pool == pool for demand in engines)
            certain, peak = peaks_of(
                [on_device[role].times(n) for role, n in zip(roles, counts, strict=True)],
                engine=engine if has_engine else 0.0,
                engine_sleeps=self.has_gpus and sleeps,
                states_sleep=self.has_gpus and config.ds.enable_sleep,
            )
            peak += PROCESS * sum(counts)
            gpu = f"a GPU of {pool}" if pool else "a GPU"
            device = gpu if self.has_gpus else "this machine"
            lines[device] = f"about {human_size(peak)}"
            if have is not None:
                lines[device] += f"; {human_size(have)} are there"
                with self.gathered:
                    self.check_fits(device, certain, peak, have)
        if lines:
            print_banner({"memory of each rank, about": lines})

    def check_fits(self, device: str, certain: float, peak: float, have: float) -> None:
        """Raise ConfigError if weights and states cannot fit; warn if micro-batches may not."""
        less, less_work = "--bf16 or --load_in_4bit", "a smaller --micro_rollout_batch_size"
        if self.trained:
            less = "--lora_rank 16, or take a smaller model"
            less_work = "a smaller --micro_train_batch_size, or --gradient_checkpointing"
        if self.trained and self.has_gpus:
            less = "--zero_stage 3, --adam_offload or --lora_rank 16, or give it more ranks"
        if self.has_gpus and any(demand.role == "vllm" for demand in self.demands):
            less = f"a smaller --vllm_gpu_memory_utilization, {less}"
        if certain > have:
            raise ConfigError(
                f"memory of {device}: {human_size(certain)} of weights, optimizer states and "
                f"engines do not fit into {human_size(have)}. Type {less}."
            )
        if peak > have:
            peak_text = f"about {human_size(peak)} of {human_size(have)}"
            warn(f"memory of {device}: {peak_text}. Type {less_work}")

    def has_room_for(self, roles: Iterable[str]) -> bool:
        """Return True if this machine has memory now for the weights of these roles."""
        shapes, ds = [self.shapes.get(role) for role in roles], self.config.ds
        here = [
            replace(shape, dtype=resolve_dtype(ds.param_dtype, shape.config))
            for shape in shapes
            if shape is not None
        ]
        sizes = [shape.num_bytes(ds) for shape in here]
        has_gpu = torch.cuda.is_available()
        free = torch.cuda.mem_get_info()[0] if has_gpu else free_memory()
        return len(sizes) == len(shapes) and sum(sizes) < ROOM * free

    def device_bytes(self) -> float | None:
        """Return the memory of a device; None for GPUs of other machines."""
        if not self.has_gpus:
            return float(free_memory())
        is_here = torch.cuda.is_available()
        return float(torch.cuda.get_device_properties(0).total_memory) if is_here else None

    def engine_bytes(
        self, config: GenerationRunConfig, num_engines: int, have: float | None
    ) -> float:
        """Return the bytes that an engine takes of its GPU, or all engines of this machine's
        memory; 0 if that is not known.
        """
        if self.has_gpus:
            return config.vllm.gpu_memory_utilization * (have or 0.0)
        policy = self.shapes.get("actor") or self.shape(Model(config.policy_path))
        if policy is None:
            return 0.0
        cache = cache_bytes(
            cache_bytes_per_token(policy),
            max_len=config.total_len,
            num_seqs=MAX_NUM_SEQS * config.vllm.tensor_parallel_size,
        )
        return num_engines * (policy.num_parameters * policy.dtype.itemsize + cache)

    def check_disk(self, exported: Shape) -> None:
        """Say what is written and where; note a model that has no room."""
        config, ckpt = self.config, self.config.ckpt
        folder = Path(ckpt.output_dir)
        with self.gathered:
            check_room(exported.module, folder, num_copies=config.num_exported)
        size = config.num_exported * exported.num_trained * exported.dtype.itemsize
        lines = {
            "model": f"{human_size(size)} in {folder}; {human_size(free_bytes(folder))} are free"
        }
        if ckpt.save_steps > 0:
            states = sum(3 * 4 * shape.num_trained for shape in self.trained.values())
            each = (0 if ckpt.disable_ds else states) + (size if ckpt.save_hf else 0)
            free = free_bytes(Path(ckpt.path))
            need = (ckpt.max_num + 1) * each  # a new one is written before the oldest goes
            told = (
                f"{ckpt.max_num} of {human_size(each)} in {ckpt.path}; {human_size(free)} are free"
            )
            lines["checkpoints"] = told
            if not ckpt.disable_ds:
                sleeps = self.has_gpus and config.ds.enable_sleep
                what = "the copy of a checkpoint" + " and states that sleep" * sleeps
                host = f"{human_size(states * (1 + sleeps))} for {what}, over all nodes"
                lines["host memory"] = f"{host}; {human_size(free_memory())} are free here"
            if not has_room(Path(ckpt.path), need):
                told = f"--ckpt_path {ckpt.path}: {ckpt.max_num + 1} checkpoints take "
                told += f"{human_size(need)}, and {human_size(free)} are free. Type a smaller "
                warn(f"{told}--max_ckpt_num, or make room")
        print_banner({"disk": lines})
