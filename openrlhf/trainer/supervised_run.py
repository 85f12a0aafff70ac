"""What every supervised command does around its loop: read, check, load, train, export.

A recipe says how rows become samples, which model is trained and which trainer trains it; the order
of the steps is the same for all. Everything a user can get wrong in data is raised before a model
is loaded.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn

from openrlhf.config.cli import save_resolved
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.datasets.command_data import supervised_data
from openrlhf.datasets.conventions import Recognised, as_recognised, news, undecided
from openrlhf.datasets.model_limits import ModelLimits
from openrlhf.datasets.problems import Gathered
from openrlhf.datasets.token_cache import giving_way
from openrlhf.distributed import collectives
from openrlhf.distributed.backend import naming_lost_ranks
from openrlhf.distributed.export import check_room, export_hf
from openrlhf.distributed.rank_watch import watching_ranks
from openrlhf.distributed.run_checkpoints import DataFacts, Opened, export_final
from openrlhf.distributed.run_folder import holding_folders
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.topology import Topology
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import add_lora
from openrlhf.models.attention_note import say_attention
from openrlhf.models.families import refuse_shared_rows, refuse_split_layers, refuse_token_budget
from openrlhf.models.kernels import check_here
from openrlhf.models.loading import LoadOptions, disable_dropout, load_causal_lm, load_config
from openrlhf.models.router_loss import check_has_experts
from openrlhf.models.sizes import num_positions
from openrlhf.trainer.base_trainer import BaseTrainer, LoopParts, LoopSettings, SampleSet
from openrlhf.trainer.checkpointing import Checkpointer, is_at_end, open_checkpoints
from openrlhf.utils import stopping
from openrlhf.utils.adapter_folder import base_of_adapter
from openrlhf.utils.logging import (
    format_count,
    notice,
    print_banner,
    redirect_framework_logs,
    say_notices,
    warn,
)
from openrlhf.utils.progress import counter, hide_bars
from openrlhf.utils.tokenizer import Tokenizer, load_tokenizer
from openrlhf.utils.tracking import NullTracker, Tracker, make_tracker

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)
Progress = Callable[[int, int], None]  # rows done, rows in all
EVALUATION = "evaluation"  # among the settings in a checkpoint: the hash of its evaluation data


class RowSamples(SampleSet[Any], Recognised, Protocol):
    """Samples made from the rows of a data set."""

    notices: list[str]  # what a person should be told about left-out rows, one line each

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens and labels, to notice on resume that the data changed."""

    def check_fits(self, limits: ModelLimits) -> None:
        """Raise DataError where a model of these sizes cannot read a sample."""


@dataclass(frozen=True)
class Inputs:
    """What is read and checked before a model is loaded."""

    run_dir: Path
    model_path: str
    tokenizer: Tokenizer
    samples: RowSamples
    eval_samples: RowSamples | None


@dataclass(frozen=True)
class SupervisedRun(Generic[ConfigT]):
    """What a trainer is made of, once its model is ready to train."""

    config: ConfigT
    inputs: Inputs
    strategy: DeepSpeedStrategy
    model: nn.Module  # the module that `engine` wraps
    engine: TrainEngine
    settings: LoopSettings
    tracker: Tracker

    @property
    def loop(self) -> LoopParts:
        """What the loop of every trainer takes."""
        return LoopParts(
            samples=self.inputs.samples,
            eval_samples=self.inputs.eval_samples,
            settings=self.settings,
            tracker=self.tracker,
        )


class Recipe(ABC, Generic[ConfigT]):
    """What one command adds to a supervised run."""

    name: ClassVar[str]

    @abstractmethod
    def make_samples(
        self, config: ConfigT, rows: Dataset, tokenizer: Tokenizer, progress: Progress | None
    ) -> RowSamples:
        """Rows as samples; raises DataError that lists the bad ones."""

    @abstractmethod
    def load_model(self, config: ConfigT, model_path: str) -> nn.Module:
        """The module to train, from its checkpoint."""

    @abstractmethod
    def make_trainer(self, run: SupervisedRun[ConfigT]) -> BaseTrainer[Any, Any]:
        """The loop with this command's loss."""

    def check(self, config: ConfigT, tokenizer: Tokenizer) -> None:
        """Raise ConfigError for what only the tokenizer and the files can tell."""

    def other_models(self, config: ConfigT) -> Sequence[str]:
        """Models beside the trained one that read every sample."""
        return ()

    def banner(self, config: ConfigT) -> Mapping[str, object]:
        """Facts to print under `training` at the start."""
        return {}

    def export(self, run: SupervisedRun[ConfigT], path: Path) -> None:
        """Write the trained model at `path` in Hugging Face format; all ranks call."""
        export_hf(run.engine, hf_part(run.model), run.inputs.tokenizer, path)


def run_supervised(recipe: Recipe[ConfigT], config: ConfigT) -> None:
    """Train as `config` says and leave the model in `config.ckpt.output_dir`."""
    topology = Topology.from_env(local_rank=config.local_rank)
    with holding_folders(config.ckpt) if topology.is_main else nullcontext():
        _run(recipe, config, topology)


def _run(recipe: Recipe[ConfigT], config: ConfigT, topology: Topology) -> None:
    run_dir = Path(config.ckpt.output_dir)
    redirect_framework_logs(run_dir, f"{recipe.name}-{topology.rank}")
    if not topology.is_main:
        hide_bars()  # one rank draws for all
    inputs = prepare_inputs(recipe, config, goes_first=topology.local_rank == 0)
    config = as_recognised(config, inputs.samples, inputs.eval_samples)
    strategy = DeepSpeedStrategy(
        config.ds,
        seed=config.train.seed,
        full_determinism=config.train.full_determinism_enable,
        local_rank=config.local_rank,
        rank_timeout_s=config.train.rank_timeout_s,
    )
    if strategy.is_main:
        models = (inputs.model_path, *recipe.other_models(config))
        say_attention(config, config.ds.attention, models)
        say_notices(inputs.samples.notices)
        if base_of_adapter(inputs.model_path) is not None:
            notice(f"{inputs.model_path} is an adapter: it is merged into its base in memory")
        if inputs.eval_samples:
            new = news(inputs.eval_samples.notices, inputs.samples.notices)
            say_notices(new, about="evaluation: ")
    strategy.setup()
    facts = DataFacts(inputs.samples.fingerprint, len(inputs.samples), config.train.seed)
    opened = open_checkpoints(config.ckpt, facts, config)
    opened = with_evaluation(opened, inputs.eval_samples)
    if opened.is_done(run_dir, is_at_end=is_at_end(opened, config.train.max_epochs)):
        strategy.shut_down()
        return
    run = prepare_run(recipe, config, inputs, strategy, opened)
    check_room(hf_part(run.model), run_dir)
    trainer = recipe.make_trainer(run)
    checkpointer = Checkpointer(
        trainer, opened, config.ckpt, export=lambda path: recipe.export(run, path)
    )
    checkpointer.resume()
    if strategy.is_main:  # what is refused leaves the folder as it was
        unsaid = undecided(config, inputs.samples, inputs.eval_samples)
        save_resolved(config, run_dir / "config.yaml", without=unsaid)
        say_start(recipe, run, trainer)
    try:
        with (
            stopping.patiently(config.ckpt.grace_s),
            naming_lost_ranks(),
            watching_ranks(config.train.rank_timeout_s),
        ):
            trainer.fit(after_step=checkpointer.after_step)
    except stopping.Interrupted:
        strategy.shut_down()
        raise
    export_final(lambda path: recipe.export(run, path), run_dir)
    if strategy.is_main:
        opened.note_finished(run_dir, trainer.global_step)
        notice(f"model saved to {run_dir}")
    strategy.shut_down()


def with_evaluation(opened: Opened, samples: RowSamples | None) -> Opened:
    """The checkpoints with a note of the evaluation data; where a run goes on with other data than
    before, that is said.
    """
    saved, now = opened.saved, None if samples is None else samples.fingerprint
    before = None if saved is None else saved.state.get("settings", {}).get(EVALUATION)
    if saved is not None and collectives.is_main() and None not in (before, now) and before != now:
        warn(
            f"the evaluation data changed since {saved.path} was written: its metrics of before "
            "and of now are not of the same samples"
        )
    return replace(opened, settings={**opened.settings, EVALUATION: now})


def prepare_inputs(recipe: Recipe[ConfigT], config: ConfigT, *, goes_first: bool = True) -> Inputs:
    """Tokenizer and data; everything a user can get wrong in them is raised here.

    Of the ranks on a machine the one that goes first tokenises and shows it; the others wait for
    what it leaves in the cache.
    """
    model_path = config.model.model_name_or_path
    assert model_path is not None, "SupervisedConfig.check_model_is_named"
    gathered = Gathered()
    gathered.attempt(partial(check_here, config.ds))
    configs = _configs(recipe, config, model_path, gathered)
    data = config.data
    tokenizer = gathered.attempt(
        lambda: load_tokenizer(
            model_path,
            chat_template=data.tokenizer_chat_template,
            use_fast=not data.disable_fast_tokenizer,
            trust_remote_code=config.trust_remote_code,
        )
    )
    found = [data_set.read(gathered) for data_set in supervised_data(config)]
    rows, eval_rows = [*found, None][:2]
    if tokenizer is None:  # nothing more can be known
        gathered.raise_if_any()
    assert tokenizer is not None, "or else problems were raised"
    gathered.attempt(lambda: recipe.check(config, tokenizer))
    samples, eval_samples = None, None
    with giving_way(gives_way=not goes_first):
        if rows is not None:
            samples = gathered.attempt(
                lambda: _samples(recipe, config, tokenizer, rows, is_shown=goes_first)
            )
        if eval_rows is not None:
            what = "evaluation rows"
            eval_samples = gathered.attempt(
                lambda: _samples(
                    recipe, config, tokenizer, eval_rows, is_shown=goes_first, what=what
                ),
                about="evaluation: ",
            )
    readers = [limits_of(facts, path) for path, facts in configs.items()]
    for found, about in ((samples, ""), (eval_samples, "evaluation: ")):
        for limits in readers if found is not None else []:
            gathered.attempt(partial(found.check_fits, limits), about=about)
    gathered.raise_if_any()
    assert samples is not None, "or else problems were raised"
    return Inputs(Path(config.ckpt.output_dir), model_path, tokenizer, samples, eval_samples)


def _configs(
    recipe: Recipe[ConfigT], config: ConfigT, model_path: str, gathered: Gathered
) -> dict[str, PretrainedConfig]:
    """The configs of the models that read the rows, by path."""
    found: dict[str, PretrainedConfig] = {}
    for path in dict.fromkeys((model_path, *recipe.other_models(config))):
        facts = gathered.attempt(
            partial(load_config, path, trust_remote_code=config.trust_remote_code)
        )
        if facts is None:
            continue
        found[path] = facts
        if config.train.dynamic_batch_enable:
            gathered.attempt(partial(refuse_token_budget, facts, path))
        gathered.attempt(partial(refuse_shared_rows, facts, path, config.ds))
        gathered.attempt(partial(refuse_split_layers, facts, path, config.ds))
        if config.model.aux_loss_coef > 0 and path == model_path:
            gathered.attempt(partial(check_has_experts, facts, path))
    return found


def limits_of(config: PretrainedConfig, path: str) -> ModelLimits:
    """The sizes in a model's config, where a family may have other names for them, or none."""
    return ModelLimits(
        path,
        num_embeddings=getattr(config.get_text_config(), "vocab_size", None),
        num_positions=num_positions(config),
    )


def _samples(
    recipe: Recipe[ConfigT],
    config: ConfigT,
    tokenizer: Tokenizer,
    rows: Dataset,
    *,
    is_shown: bool,
    what: str = "rows",
) -> RowSamples:
    with counter(f"tokenising {what}", is_shown=is_shown) as show:
        return recipe.make_samples(config, rows, tokenizer, show)


def prepare_run(
    recipe: Recipe[ConfigT],
    config: ConfigT,
    inputs: Inputs,
    strategy: DeepSpeedStrategy,
    opened: Opened,
) -> SupervisedRun[ConfigT]:
    """Load the model, wrap it for training, open the sinks."""
    settings = LoopSettings.of(config)
    model = recipe.load_model(config, inputs.model_path)
    engine = strategy.prepare_train(
        model, config, num_updates=settings.num_updates(len(inputs.samples))
    )
    tracker: Tracker = NullTracker()
    if strategy.is_main:
        opened.clear_folder(inputs.run_dir, config)
        tracker = make_tracker(
            config.logger,
            inputs.run_dir,
            config.model_dump(mode="json"),
            resume_step=opened.resume_step,
        )
    return SupervisedRun(config, inputs, strategy, model, engine, settings, tracker)


def load_options(config: SupervisedConfig) -> LoadOptions:
    """How a supervised command loads its models."""
    ds = config.ds
    return LoadOptions(
        attn_implementation=ds.attention,
        dtype=ds.param_dtype,
        trust_remote_code=config.trust_remote_code,
        load_in_4bit=ds.load_in_4bit,
        experts_implementation=ds.experts_implementation,
        use_liger_kernel=ds.use_liger_kernel,
    )


def load_actor(config: SupervisedConfig, model_path: str, *, has_dropout: bool = True) -> Actor:
    """The policy to train: with an adapter and gradient checkpointing when they are asked for.

    Without dropout the model answers the same in training and evaluation, as losses against a
    reference need it; an adapter's own dropout stays.
    """
    model = load_causal_lm(model_path, **load_options(config))
    if not has_dropout:
        disable_dropout(model)
    with_aux_loss = config.model.aux_loss_coef > 0
    actor = Actor(add_lora(model, config.ds.lora), with_aux_loss=with_aux_loss)
    if config.model.gradient_checkpointing_enable:
        actor.gradient_checkpointing_enable(config.model.gradient_checkpointing_reentrant)
    return actor


def hf_part(module: nn.Module) -> nn.Module:
    """The Hugging Face model inside an actor or a value-head model."""
    model = getattr(module, "model", None)
    assert isinstance(model, nn.Module), f"{type(module).__name__} holds no model"
    return model


def say_start(
    recipe: Recipe[ConfigT], run: SupervisedRun[ConfigT], trainer: BaseTrainer[Any, Any]
) -> None:
    """The banner: model, data, batch arithmetic, run folder."""
    parameters = list(run.engine.module.parameters())
    num_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    num_trained = sum(getattr(p, "ds_numel", p.numel()) for p in parameters if p.requires_grad)
    inputs, train, topology = run.inputs, run.config.train, run.strategy.topology
    trained = "" if num_trained == num_parameters else f", {format_count(num_trained)} trained"
    asked, stage = run.config.ds.zero_stage, run.engine.zero_stage
    print_banner(
        {
            "model": {
                "base": inputs.model_path,
                "parameters": format_count(num_parameters) + trained,
                "type": str(parameters[0].dtype).removeprefix("torch."),
            },
            "machine": {
                "ranks": f"{topology.world_size} on {run.strategy.device.type}",
                "ZeRO stage": stage if stage == asked else f"{asked}, runs as {stage} here",
                "threads": os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()),
            },
            "data": {
                "rows": len(inputs.samples),
                "tokens": format_count(int(inputs.samples.lengths.sum())),
                "evaluation": len(inputs.eval_samples) if inputs.eval_samples else "none",
            },
            "training": {
                "batch": f"{train.batch_size} rows in micro-batches of {train.micro_batch_text}",
                "updates": f"{trainer.num_updates} in {train.max_epochs} epoch(s)",
                **recipe.banner(run.config),
                "run folder": inputs.run_dir,
            },
        }
    )
