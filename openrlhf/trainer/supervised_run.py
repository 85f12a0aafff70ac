"""The steps of every supervised command around its loop: read, check, load, train, save, export.

A recipe is the class of its trainer. Everything a user can get wrong in data is raised before a
model is loaded.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from openrlhf.config.cli import save_resolved
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.datasets.command_data import supervised_data
from openrlhf.datasets.problems import Gathered
from openrlhf.datasets.tokenized import news
from openrlhf.distributed.checkpoints import (
    DataFacts,
    RunCheckpoints,
    export_final,
    open_checkpoints,
    random_state,
    set_random_state,
)
from openrlhf.distributed.collectives import (
    all_reduce_max,
    is_main,
    naming_lost_ranks,
    watching_ranks,
)
from openrlhf.distributed.export import check_room
from openrlhf.distributed.folders import holding_folders, write_json
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.topology import Topology
from openrlhf.distributed.weights import hf_model_of
from openrlhf.models.loading import load_config, say_attention
from openrlhf.models.support import check_here, num_positions, refuse_unsupported
from openrlhf.trainer.base_trainer import (
    BaseTrainer,
    Inputs,
    LoopSettings,
    SupervisedRun,
)
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
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.progress import hide_bars, progress
from openrlhf.utils.tokenizer import load_tokenizer
from openrlhf.utils.tracking import NullTracker, Tracker, make_tracker

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)
Recipe = type[BaseTrainer[Any, Any]]
MODEL = "model"  # the engine's folder in a checkpoint


def run_supervised(recipe: Recipe, config: ConfigT) -> None:
    """Train as `config` says and leave the model in `config.ckpt.output_dir`."""
    topology = Topology.from_env(local_rank=config.local_rank)
    with holding_folders(config.ckpt) if topology.is_main else nullcontext():
        _run(recipe, config, topology)


def _run(recipe: Recipe, config: ConfigT, topology: Topology) -> None:
    run_dir = Path(config.ckpt.output_dir)
    redirect_framework_logs(run_dir, f"{recipe.name}-{topology.rank}")
    if not topology.is_main:
        hide_bars()  # one rank draws for all
    inputs = prepare_inputs(recipe, config)
    strategy = DeepSpeedStrategy(
        config.ds,
        seed=config.train.seed,
        full_determinism=config.train.full_determinism_enable,
        local_rank=config.local_rank,
        rank_timeout_s=config.train.rank_timeout_s,
    )
    if strategy.is_main:
        models = (inputs.model_path, *recipe.other_models(config))
        say_attention(config, models)
        say_notices(inputs.samples.notices)
        if base_of_adapter(inputs.model_path) is not None:
            notice(f"{inputs.model_path} is an adapter: it is merged into its base in memory")
        if inputs.eval_samples:
            new = news(inputs.eval_samples.notices, inputs.samples.notices)
            say_notices(new, about="evaluation: ")
    strategy.setup()
    facts = DataFacts(inputs.samples.fingerprint, len(inputs.samples), config.train.seed)
    opened = open_checkpoints(config.ckpt, facts, config)
    if opened.is_done(run_dir, is_at_end=is_at_end(opened, config.train.max_epochs)):
        strategy.shut_down()
        return
    run = prepare_run(recipe, config, inputs, strategy, opened)
    check_room(hf_model_of(run.model), run_dir)
    trainer = recipe(run)
    checkpointer = Checkpointer(trainer, opened)
    checkpointer.resume()
    if strategy.is_main:  # what is refused leaves the folder as it was
        save_resolved(config, run_dir / "config.yaml")
        say_start(trainer)
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
    export_final(trainer.export, run_dir)
    if strategy.is_main:
        opened.note_finished(run_dir, trainer.global_step)
        notice(f"model saved to {run_dir}")
    strategy.shut_down()


def prepare_inputs(recipe: Recipe, config: ConfigT) -> Inputs:
    """Read tokenizer and data; raise what a user can get wrong in them."""
    model_path = config.model.model_name_or_path
    assert model_path is not None, "a model is needed"
    gathered = Gathered()
    gathered.attempt(partial(check_here, config.ds))
    configs = _configs(recipe, config, model_path, gathered)
    data = config.data
    tokenizer = gathered.attempt(
        lambda: load_tokenizer(
            model_path,
            chat_template=data.tokenizer_chat_template,
            trust_remote_code=config.trust_remote_code,
        )
    )
    found = [(data_set, data_set.read(gathered)) for data_set in supervised_data(config)]
    if tokenizer is None:  # nothing more can be known
        gathered.raise_if_any()
    assert tokenizer is not None, "or else problems were raised"
    gathered.attempt(lambda: recipe.check(config, tokenizer))
    made = []
    for data_set, rows in found:
        samples = None if rows is None else data_set.tokenise(gathered, rows, tokenizer)
        for path, facts in configs.items() if samples is not None else ():
            check = partial(
                samples.check_fits,
                path,
                num_embeddings=getattr(facts.get_text_config(), "vocab_size", None),
                num_positions=num_positions(facts),
            )
            gathered.attempt(check, about=data_set.about)
        made.append(samples)
    gathered.raise_if_any()
    return Inputs(model_path, tokenizer, *made)


def _configs(
    recipe: Recipe, config: ConfigT, model_path: str, gathered: Gathered
) -> dict[str, PretrainedConfig]:
    """Return the configs of the models that read the rows, by path."""
    found: dict[str, PretrainedConfig] = {}
    for path in dict.fromkeys((model_path, *recipe.other_models(config))):
        facts = gathered.attempt(
            partial(load_config, path, trust_remote_code=config.trust_remote_code)
        )
        if facts is None:
            continue
        found[path] = facts
        needs = {
            "has_token_budget": config.train.dynamic_batch_enable,
            "has_router_loss": config.model.aux_loss_coef > 0 and path == model_path,
        }
        gathered.attempt(partial(refuse_unsupported, facts, path, config.ds, **needs))
    return found


def prepare_run(
    recipe: Recipe,
    config: ConfigT,
    inputs: Inputs,
    strategy: DeepSpeedStrategy,
    opened: RunCheckpoints,
) -> SupervisedRun[ConfigT]:
    """Load the model, wrap it for training, open the sinks."""
    settings = LoopSettings.of(config)
    model = recipe.load_model(config, inputs.model_path)
    engine = strategy.prepare_train(
        model, config, num_updates=settings.num_updates(len(inputs.samples))
    )
    tracker: Tracker = NullTracker()
    if strategy.is_main:
        run_dir, told = Path(config.ckpt.output_dir), config.model_dump(mode="json")
        opened.clear_folder(run_dir, config)
        tracker = make_tracker(config.logger, run_dir, told, resume_step=opened.resume_step)
    return SupervisedRun(config, inputs, strategy, model, engine, settings, tracker)


def say_start(trainer: BaseTrainer[Any, Any]) -> None:
    """Print the banner: model, data, batch arithmetic, run folder."""
    run = trainer.run
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
                "run folder": run.config.ckpt.output_dir,
            },
        }
    )


def is_at_end(checkpoints: RunCheckpoints, max_epochs: int) -> bool:
    """Return True if the checkpoint that a run goes on from has every epoch behind it."""
    saved = checkpoints.saved
    return saved is not None and saved.state["loop"]["position"]["epoch"] >= max_epochs


class Checkpointer:
    """Saves a trainer when it is due, and puts it back where a checkpoint stands."""

    def __init__(self, trainer: BaseTrainer[Any, Any], checkpoints: RunCheckpoints) -> None:
        self.trainer = trainer
        self.checkpoints = checkpoints
        self.topology = trainer.strategy.topology

    def resume(self) -> None:
        """Put model, optimizer, position and random numbers where they were; all ranks call."""
        saved = self.checkpoints.saved
        if saved is None:
            return
        with progress("loading the checkpoint"):
            self.trainer.engine.load_states(saved.path / MODEL)
        self.trainer.load_state_dict(saved.state["loop"])
        if is_main() and self.trainer.is_finished:
            notice("that run had finished: nothing is left to train")
        before, now = saved.state["world_size"], self.topology.world_size
        if before == now:
            state = json.loads(self._rank_file(saved.path).read_text())
            set_random_state(state["random"])
            self.trainer.pending = Metrics.from_state_dict(state["metrics"])
        elif is_main():  # there is no such thing as a rank's own random numbers
            warn(f"{now} ranks go on with what {before} wrote: the same samples, other rounding.")

    def after_step(self) -> None:
        """Save when it is due; raise Interrupted once any rank was asked to stop."""
        is_saved = self.save_if_due()
        is_asked = all_reduce_max({"asked": float(stopping.is_asked())})["asked"]
        if is_asked and not self.trainer.is_finished:
            outcome = self.checkpoints.save_last(lambda: is_saved or self.save())
            self.trainer.tracker.close()
            raise stopping.Interrupted(f"step {self.trainer.global_step} is done, {outcome}")

    def save_if_due(self) -> bool:
        """Save every `--save_steps` steps and after the last; return True if it was saved."""
        checkpoints = self.checkpoints
        is_due = checkpoints.is_on and self.trainer.is_due(checkpoints.config.save_steps)
        return is_due and self.save()

    def save(self) -> bool:
        """Save now; all ranks call, and all return whether it was saved.

        Raises CheckpointError when it failed several times in a row.
        """
        position = self.trainer.position
        place = (
            f"step {position.global_step}, epoch {position.epoch + 1}, "
            f"{position.num_samples} samples into it"
        )
        state = {
            "loop": self.trainer.state_dict(),
            "world_size": self.topology.world_size,
            "place": place,
        }
        return self.checkpoints.save(
            position.global_step, write=self._write, export=self.trainer.export, state=state
        )

    def _write(self, folder: Path) -> None:
        self.trainer.engine.save_states(folder / MODEL)
        content = {"random": random_state(), "metrics": self.trainer.pending.state_dict()}
        write_json(self._rank_file(folder), content)

    def _rank_file(self, folder: Path) -> Path:
        return folder / f"rank{self.topology.rank}.json"
