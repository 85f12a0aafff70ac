"""Supervised fine-tuning and continued pre-training: token mean of -log p over the whole step."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from openrlhf.algorithms.language_loss import sft_loss
from openrlhf.config.cli import save_resolved
from openrlhf.config.supervised import SFTConfig
from openrlhf.datasets.loading import load_rows
from openrlhf.datasets.sft_dataset import SFTDataset, SFTExample, SFTFormat
from openrlhf.distributed.export import export_hf
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.topology import Topology
from openrlhf.errors import ConfigError
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm, load_config
from openrlhf.trainer.base_trainer import BaseTrainer, LoopSettings
from openrlhf.utils.logging import (
    counter,
    format_count,
    notice,
    print_banner,
    redirect_framework_logs,
    warn,
)
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tokenizer import Tokenizer, load_tokenizer
from openrlhf.utils.tracking import NullTracker, Tracker, make_tracker


class SFTTrainer(BaseTrainer[SFTExample, PackedBatch]):
    """The language-model loss on the tokens a row marks."""

    aux_loss_coef = 0.0

    def counts(self, samples: Sequence[SFTExample]) -> dict[str, float]:
        """Tokens that are learned."""
        return {"num_tokens": float(sum(int(sample.loss_mask.sum()) for sample in samples))}

    def collate(self, samples: Sequence[SFTExample]) -> PackedBatch:
        """One row of all sequences."""
        return PackedBatch.from_sequences(
            [sample.token_ids for sample in samples], [sample.loss_mask for sample in samples]
        )

    def empty_sample(self) -> SFTExample:
        """Two tokens, the second learned."""
        return SFTExample(torch.zeros(2, dtype=torch.int64), torch.tensor([False, True]))

    def compute_loss(
        self, batch: PackedBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """-sum log p / tokens of the step, plus the router loss of a mixture of experts."""
        stats = self.engine(batch)
        num_tokens, total = len(stats.logprobs), denominators["num_tokens"]
        loss = sft_loss(stats.logprobs, num_tokens_global=total)
        metrics = Metrics()
        metrics.add("gpt_loss", loss.item() * total / num_tokens, weight=num_tokens)
        if self.aux_loss_coef and stats.aux_loss is not None:
            metrics.add("aux_loss", stats.aux_loss.item(), weight=num_tokens)
            loss = loss + self.aux_loss_coef * stats.aux_loss * (num_tokens / total)
        return loss, metrics

    def summarise(self, values: dict[str, float]) -> dict[str, float]:
        """Perplexity; infinite where the loss is beyond what a float's exponential can hold."""
        loss = values["gpt_loss"]
        return {"ppl": math.exp(loss) if loss < 700 else math.inf}


@dataclass(frozen=True)
class SFTInputs:
    """What is read and checked before a model is loaded."""

    run_dir: Path
    model_path: str
    tokenizer: Tokenizer
    samples: SFTDataset
    eval_samples: SFTDataset | None


def run_sft(config: SFTConfig) -> None:
    """Train as `config` says and leave the model in `config.ckpt.output_dir`."""
    topology = Topology.from_env(local_rank=config.local_rank)
    run_dir = Path(config.ckpt.output_dir)
    redirect_framework_logs(run_dir, f"sft-{topology.rank}")
    inputs = prepare_inputs(config)
    strategy = DeepSpeedStrategy(
        config.ds,
        seed=config.train.seed,
        full_determinism=config.train.full_determinism_enable,
        local_rank=config.local_rank,
    )
    if strategy.is_main:
        save_resolved(config, run_dir / "config.yaml")
        for line in inputs.samples.notices:
            warn(line)
    strategy.setup()
    actor = load_actor(config, inputs.model_path)
    trainer = make_trainer(config, inputs, strategy, actor)
    if strategy.is_main:
        say_start(config, inputs, trainer)
    trainer.fit()
    export_hf(trainer.engine, actor.model, inputs.tokenizer, run_dir)
    if strategy.is_main:
        notice(f"model saved to {run_dir}")
    strategy.shut_down()


def prepare_inputs(config: SFTConfig) -> SFTInputs:
    """Tokenizer and data; everything a user can get wrong in them is raised here."""
    model_path = config.model.model_name_or_path
    assert model_path is not None, "SFTConfig.check_model_is_named"
    load_config(model_path, trust_remote_code=config.trust_remote_code)
    data = config.data
    tokenizer = load_tokenizer(
        model_path,
        chat_template=data.tokenizer_chat_template,
        use_fast=not data.disable_fast_tokenizer,
        trust_remote_code=config.trust_remote_code,
    )
    sft_format = format_of(config)
    rows = load_rows(
        data.dataset or "",
        split=data.dataset_split,
        probs=data.dataset_probs,
        max_samples=data.max_samples,
        seed=config.train.seed,
    )
    with counter("tokenising rows") as show:
        samples = SFTDataset(rows, tokenizer, sft_format, progress=show)
    eval_samples = None
    if config.eval.dataset:
        eval_rows = load_rows(
            config.eval.dataset, split=config.eval.split, max_samples=data.max_samples
        )
        eval_samples = SFTDataset(eval_rows, tokenizer, sft_format)
    run_dir = Path(config.ckpt.output_dir)
    return SFTInputs(run_dir, model_path, tokenizer, samples, eval_samples)


def format_of(config: SFTConfig) -> SFTFormat:
    """How rows become examples."""
    data = config.data
    return SFTFormat(
        input_key=data.input_key,
        output_key=data.output_key,
        input_template=data.input_template,
        apply_chat_template=data.apply_chat_template,
        multiturn=data.multiturn,
        pretrain_mode=config.model.pretrain_mode_enable,
        max_len=data.max_len,
        overlong=data.overlong_rows,
    )


def load_actor(config: SFTConfig, model_path: str) -> Actor:
    """The model to train, from its checkpoint."""
    ds = config.ds
    model = load_causal_lm(
        model_path,
        attn_implementation=ds.attn_implementation,
        dtype=ds.param_dtype,
        trust_remote_code=config.trust_remote_code,
        load_in_4bit=ds.load_in_4bit,
        experts_implementation=ds.experts_implementation,
    )
    actor = Actor(model)
    if config.model.gradient_checkpointing_enable:
        actor.gradient_checkpointing_enable(config.model.gradient_checkpointing_reentrant)
    return actor


def make_trainer(
    config: SFTConfig, inputs: SFTInputs, strategy: DeepSpeedStrategy, actor: Actor
) -> SFTTrainer:
    """Wrap the model for training and give it data and sinks."""
    largest = max(int(sample.token_ids.max()) for sample in _first(inputs.samples, 100))
    vocab_size = actor.model.get_input_embeddings().num_embeddings
    if largest >= vocab_size:
        raise ConfigError(
            f"The tokenizer gives id {largest}, but the model has {vocab_size} embeddings. "
            "Use the model's own tokenizer."
        )
    settings = LoopSettings.of(config)
    num_updates = settings.num_updates(len(inputs.samples))
    engine = strategy.prepare_train(actor, config, num_updates=num_updates)
    tracker: Tracker = NullTracker()
    if strategy.is_main:
        tracker = make_tracker(config.logger, inputs.run_dir, config.model_dump(mode="json"))
    trainer = SFTTrainer(
        strategy,
        engine,
        samples=inputs.samples,
        eval_samples=inputs.eval_samples,
        settings=settings,
        tracker=tracker,
    )
    trainer.aux_loss_coef = config.model.aux_loss_coef
    return trainer


def say_start(config: SFTConfig, inputs: SFTInputs, trainer: SFTTrainer) -> None:
    """The banner: model, data, batch arithmetic, run folder."""
    parameters = list(trainer.engine.module.parameters())
    num_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    topology, train = trainer.strategy.topology, config.train
    print_banner(
        {
            "model": {
                "base": inputs.model_path,
                "parameters": format_count(num_parameters),
                "type": str(parameters[0].dtype).removeprefix("torch."),
            },
            "machine": {
                "ranks": f"{topology.world_size} on {trainer.strategy.device.type}",
                "ZeRO stage": config.ds.zero_stage,
                "threads": os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()),
            },
            "data": {
                "rows": len(inputs.samples),
                "tokens": format_count(int(inputs.samples.lengths.sum())),
                "evaluation": len(inputs.eval_samples) if inputs.eval_samples else "none",
            },
            "training": {
                "batch": f"{train.batch_size} rows in micro-batches of {train.micro_batch_size}",
                "updates": f"{trainer.num_updates} in {train.max_epochs} epochs",
                "run folder": inputs.run_dir,
            },
        }
    )


def _first(samples: SFTDataset, count: int) -> list[SFTExample]:
    return [samples[index] for index in range(min(count, len(samples)))]
