"""The steps of every supervised command around its loop: read, check, load, train, save, export.

A recipe is the class of its trainer. Everything a user can get wrong in data is raised before a
model is loaded.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from openrlhf.config.cli import save_resolved
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.datasets.command_data import supervised_data
from openrlhf.datasets.tokenized import news, repeats, write_bad_rows
from openrlhf.distributed.checkpoints import (
    RUN,
    RunCheckpoints,
    export_final,
    exporting_anyway,
    open_checkpoints,
    random_state,
    set_random_state,
)
from openrlhf.distributed.collectives import (
    all_gather_object,
    is_main,
    naming_lost_ranks,
    on_main,
    shut_down,
    watching_ranks,
)
from openrlhf.distributed.export import check_room
from openrlhf.distributed.folders import Write, holding_folders, read_json, write_json
from openrlhf.distributed.hub import open_repository, push
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.topology import Topology
from openrlhf.distributed.weights import hf_model_of
from openrlhf.errors import ConfigError, DataError, Gathered
from openrlhf.models.loading import image_processor_of, read_configs, say_padded
from openrlhf.models.support import check_here, num_positions
from openrlhf.report.report import reporting
from openrlhf.trainer.base_trainer import BaseTrainer, Inputs, num_updates
from openrlhf.utils import stopping
from openrlhf.utils.adapter_folder import base_of_adapter
from openrlhf.utils.callbacks import Callback
from openrlhf.utils.console import format_count, notice, print_banner, say_notices, warn
from openrlhf.utils.framework_logs import redirect_framework_logs
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.outcome import say_outcome, say_saved
from openrlhf.utils.progress import hide_bars, progress
from openrlhf.utils.run_folder import BAD_ROWS_FILE, CONFIG_FILE
from openrlhf.utils.tensors import dtype_name
from openrlhf.utils.tokenizer import tokenizer_of
from openrlhf.utils.tracker import make_tracker

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)
Recipe = type[BaseTrainer[Any, Any]]
MODEL = "model"  # the engine's folder in a checkpoint


def run_supervised(recipe: Recipe, config: ConfigT, *, callbacks: Sequence[Callback] = ()) -> None:
    """Train as `config` says and leave the model in `config.ckpt.output_dir`."""
    topology = Topology.from_env(local_rank=config.local_rank)
    if topology.is_main:
        with holding_folders(config.ckpt):
            if config.ckpt.push_to_hub:  # what is wrong there is known before training
                open_repository(config.ckpt.push_to_hub)
            checkpointer = _run(recipe, config, topology, callbacks)
            if checkpointer is not None:
                checkpointer.say_outcome()  # a model that got worse is the last line
    else:
        _run(recipe, config, topology, callbacks)


def _run(
    recipe: Recipe, config: ConfigT, topology: Topology, callbacks: Sequence[Callback]
) -> "Checkpointer | None":
    run_dir = Path(config.ckpt.output_dir)
    redirect_framework_logs(run_dir, f"{recipe.name}-{topology.rank}")
    if not topology.is_main:
        hide_bars()  # one rank draws for all
    inputs = prepare_inputs(recipe, config)
    strategy = DeepSpeedStrategy.of(config)
    if strategy.is_main:
        say_inputs(recipe, config, inputs)
    strategy.setup()
    check_same_data(inputs)
    checkpoints = open_checkpoints(config.ckpt, inputs.data, config)
    if checkpoints.is_done(run_dir):
        shut_down()
        return None
    is_resumed = checkpoints.saved is not None
    reported = reporting(config, is_resumed=is_resumed) if strategy.is_main else nullcontext()
    with reported, stopping.explaining_end(checkpoints.how_to_go_on):
        trainer = recipe(config, inputs, strategy)
        trainer.callbacks = callbacks
        return _train(trainer, config, checkpoints)


def check_same_data(inputs: Inputs) -> None:
    """Raise DataError unless all ranks have the same rows: each picks its own by their number."""
    held_out = inputs.eval_samples
    found = all_gather_object((inputs.data, held_out.fingerprint if held_out else None))
    if other := [rank for rank, data in enumerate(found) if data != found[0]]:
        raise DataError(
            f"The rows of rank {other[0]} are not those of rank 0. Copy the data sets to all nodes "
            "again, or put them where all nodes read them."
        )


def _train(
    trainer: BaseTrainer[Any, Any], config: SupervisedConfig, checkpoints: RunCheckpoints
) -> "Checkpointer":
    strategy, run_dir = trainer.strategy, Path(config.ckpt.output_dir)
    model = hf_model_of(trainer.model)
    model_bytes = check_room(model, run_dir, num_copies=config.num_exported)
    checkpoints.check_room(trainer.engine.num_state_bytes(), model_bytes)
    if strategy.is_main:
        told, step = config.model_dump(mode="json"), checkpoints.resume_step
        trainer.tracker = make_tracker(config.logger, run_dir, told, resume_step=step)
    checkpointer = Checkpointer(trainer, checkpoints)
    checkpointer.resume()
    if config.ckpt.keeps_best:
        trainer.keep_best = checkpointer.keep_best
    if strategy.is_main:  # what is refused leaves the folder as it was
        checkpoints.clear_folder(run_dir, config)
        if checkpoints.resume_step is not None:
            trainer.tracker.rewind(checkpoints.resume_step)
        save_resolved(config, run_dir / CONFIG_FILE)
        data_sets = (trainer.inputs.samples, trainer.inputs.eval_samples)
        write_bad_rows(run_dir / BAD_ROWS_FILE, *data_sets)
        say_start(trainer)
    export = partial(export_final, trainer.export, run_dir)
    try:
        with (
            exporting_anyway(export, run_dir),
            stopping.patiently(config.ckpt.grace_s),
            checkpoints.finishing(),
            naming_lost_ranks(),
            watching_ranks(config.train.rank_timeout_s),
        ):
            trainer.fit(after_step=checkpointer.after_step)
    except stopping.Interrupted:
        shut_down()
        raise
    export()
    if strategy.is_main:
        checkpoints.note_finished(run_dir, trainer.global_step)
        say_saved(run_dir)
        if config.ckpt.push_to_hub:
            push(run_dir, config.ckpt.push_to_hub)
    for callback in trainer.callbacks:
        callback.on_save(trainer, trainer.global_step, run_dir)
    shut_down()
    return checkpointer


def prepare_inputs(recipe: Recipe, config: ConfigT) -> Inputs:
    """Read tokenizer and data; raise what a user can get wrong in them."""
    model_path = config.model.model_name_or_path
    assert model_path is not None, "a model is needed"
    gathered = Gathered()
    with gathered:
        check_here(config.ds)
    configs = read_configs(
        (model_path, *recipe.other_models(config)),
        config,
        gathered,
        has_router_loss=config.model.aux_loss_coef > 0,
        scores=recipe.scores,
    )
    tokenizer = None
    with gathered:
        tokenizer = tokenizer_of(config, model_path)
    image_processor = None
    with gathered:
        image_processor = image_processor_of(config, model_path, configs.get(model_path))
        if image_processor is not None and not recipe.reads_pictures:
            raise ConfigError(
                f"openrlhf {recipe.name} reads texts alone, and {model_path} reads images. Take a "
                "model of texts, or openrlhf sft, dpo or ppo."
            )
        own = configs[model_path].model_type if image_processor is not None else None
        for path, other in configs.items():
            if own not in (None, other.model_type):
                raise ConfigError(
                    f"{path} is of the family {other.model_type}, which does not read the images "
                    f"of {model_path}. Take a model of {own}."
                )
    data_sets = supervised_data(config, recipe.data_set, **recipe.row_format(config))
    found = [(data_set, data_set.read(gathered)) for data_set in data_sets]
    if tokenizer is None:  # nothing more can be known
        gathered.raise_if_any()
    assert tokenizer is not None, "or else problems were raised"
    with gathered:
        recipe.check(config, tokenizer)
    with gathered:
        recipe.best_metric(config)
    made = []
    for data_set, rows in found:
        samples = (
            None if rows is None else data_set.tokenise(gathered, rows, tokenizer, image_processor)
        )
        for path, model_config in configs.items() if samples is not None else ():
            with gathered.about(data_set.about):
                samples.check_fits(
                    path,
                    num_embeddings=getattr(model_config.get_text_config(), "vocab_size", None),
                    num_positions=num_positions(model_config),
                )
        made.append(samples)
    gathered.raise_if_any()
    samples, *eval_samples = made
    return Inputs(model_path, tokenizer, samples, *eval_samples, image_processor=image_processor)


def say_inputs(recipe: Recipe, config: ConfigT, inputs: Inputs) -> None:
    """Print what was noticed of the models and the data."""
    say_padded(config, dict.fromkeys((inputs.model_path, *recipe.other_models(config))))
    samples = inputs.samples
    say_notices([*recipe.notices(config), *samples.notices, *samples.template_notices])
    if base_of_adapter(inputs.model_path) is not None:
        notice(f"{inputs.model_path} is an adapter: it is merged into its base in memory")
    if inputs.eval_samples:
        new = news(inputs.eval_samples.notices, inputs.samples.notices)
        say_notices([*new, *repeats(inputs.eval_samples, inputs.samples)], about="evaluation: ")


def say_start(trainer: BaseTrainer[Any, Any]) -> None:
    """Print the banner."""
    engine, strategy = trainer.engine, trainer.strategy
    sections = banner_sections(
        trainer.config,
        trainer.inputs,
        list(engine.module.parameters()),
        stage=engine.zero_stage,
        ranks=f"{strategy.topology.world_size} on {strategy.device.type}",
    )
    print_banner(sections)


def banner_sections(
    config: SupervisedConfig,
    inputs: Inputs,
    parameters: Sequence[nn.Parameter],
    *,
    stage: int,
    ranks: str,
) -> dict[str, Mapping[str, object]]:
    """Return the lines a run opens with: model, data, batch arithmetic, run folder. `stage`: the
    ZeRO stage that runs.
    """
    num_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    num_trained = sum(getattr(p, "ds_numel", p.numel()) for p in parameters if p.requires_grad)
    trained = "" if num_trained == num_parameters else f", {format_count(num_trained)} trained"
    asked, train, num_rows = config.ds.zero_stage, config.train, len(inputs.samples)
    return {
        "model": {
            "base": inputs.model_path,
            "parameters": format_count(num_parameters) + trained,
            "type": dtype_name(parameters[0].dtype),
        },
        "machine": {
            "ranks": ranks,
            "ZeRO stage": stage if stage == asked else f"{asked}, runs as {stage} here",
            "threads": os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()),
        },
        "data": {
            "rows": num_rows,
            "tokens": format_count(int(inputs.samples.lengths.sum())),
            "evaluation": len(inputs.eval_samples) if inputs.eval_samples else "none",
        },
        "training": {
            "batch": f"{train.batch_size} rows in micro-batches of {train.micro_batch_text}",
            "updates": f"{num_updates(config, num_rows)} in {train.max_epochs} epoch(s)",
            "run folder": config.ckpt.output_dir,
        },
    }


class Checkpointer:
    """Saves a trainer when it is due, and puts it back where a checkpoint stands."""

    def __init__(self, trainer: BaseTrainer[Any, Any], checkpoints: RunCheckpoints) -> None:
        self.trainer = trainer
        self.checkpoints = checkpoints
        self.num_ranks = trainer.strategy.topology.world_size
        self.rank_file = f"rank{trainer.strategy.topology.rank}.json"

    def resume(self) -> None:
        """Put model, optimizer, position and random numbers where they were; all ranks call."""
        saved = self.checkpoints.saved
        self.checkpoints.set_other_best_aside()
        if saved is None:
            return
        has_own_rate = self.checkpoints.config.reset_lr
        with progress("loading the checkpoint"):
            self.trainer.engine.load_states(saved.path / MODEL, has_own_rate=has_own_rate)
        self.trainer.global_step = saved.step
        state = saved.state[RUN]
        has_best = on_main(self.checkpoints.store.best) is not None
        self.trainer.best = state.get("best") if has_best else None
        if is_main() and self.trainer.is_finished:
            notice("that run had finished: nothing is left to train")
        self.checkpoints.saved_state = self.state_dict()
        before, now = state["world_size"], self.num_ranks
        if before == now:
            own = read_json(saved.path / self.rank_file)
            set_random_state(own["random"])
            self.trainer.pending = Metrics(own["metrics"])
        elif is_main():  # there is no such thing as a rank's own random numbers
            warn(f"{now} ranks go on with what {before} wrote: the same samples, other rounding.")

    def after_step(self) -> None:
        """Begin to save every `--save_steps` steps; save after the last. Raise Interrupted once any
        rank was asked to stop.
        """
        checkpoints, is_last = self.checkpoints, self.trainer.is_finished
        ranks = all_gather_object((stopping.is_asked(), checkpoints.is_written))
        is_asked, is_written = any(asked for asked, _ in ranks), all(over for _, over in ranks)
        is_due = checkpoints.is_due(self, is_last=is_last)
        if is_due or is_written:
            self.call_on_save(checkpoints.wait_for_save())
        if is_due:
            checkpoints.save(self)
        if is_last or is_asked:
            self.call_on_save(checkpoints.wait_for_save())
        if is_asked and not is_last:
            saved, outcome = checkpoints.save_last(self)
            self.call_on_save(saved)
            self.trainer.tracker.close()
            raise stopping.Interrupted(outcome)

    def say_outcome(self) -> None:
        """Say which evaluation was best, and where its model is."""
        trainer, unkept = self.trainer, "not kept, --save_best keeps the best"

        def where(step: int) -> object:
            if step == trainer.global_step:
                return trainer.config.ckpt.output_dir
            return self.checkpoints.find(step) or unkept

        records = trainer.tracker.records()
        say_outcome(trainer.best_metric(trainer.config), records, records, where=where)

    def keep_best(self) -> bool:
        """Keep the model of this step in place of the best one before; return True if that went
        well; all ranks call.
        """
        step = self.trainer.global_step
        is_kept = self.checkpoints.save_best(step, self.trainer.export)
        if is_kept and is_main():
            notice(f"best so far: step {step}")
        return is_kept

    def call_on_save(self, saved: tuple[int, Path] | None) -> None:
        """Tell the callbacks of a checkpoint, if there is one."""
        for callback in self.trainer.callbacks if saved else ():
            callback.on_save(self.trainer, *saved)

    @property
    def global_step(self) -> int:
        """Return the number of steps that are done."""
        return self.trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run, as JSON."""
        epoch, num_batches = self.trainer.position
        num_samples = num_batches * self.trainer.batch_size
        return {
            "world_size": self.num_ranks,
            "place": f"step {self.global_step}, epoch {epoch + 1}, {num_samples} samples into it",
            "best": self.trainer.best,
        }

    def take(self, folder: Path) -> Write:
        """Copy weights and states; return the function that writes the copy. All ranks call."""
        content = {"random": random_state(), "metrics": dict(self.trainer.pending.cells)}
        write_json(folder / self.rank_file, content)
        return self.trainer.engine.take_states(folder / MODEL)

    def export(self, path: Path) -> None:
        """Write the model as transformers reads it; all ranks call."""
        self.trainer.export(path)
