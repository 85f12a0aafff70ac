"""Settings of training that nothing reads, whatever is trained."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from openrlhf.config.base import value_at
from openrlhf.config.checks import is_blank
from openrlhf.config.idle import Idle

# What openrlhf.distributed.schedule hands to transformers, and what that does with it.
WITHOUT_LAST_RATE = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)
WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")

IDLE_ANYWHERE = (
    Idle(
        ("data.dataloader_num_workers",),
        lambda config: True,
        "here: the trainer packs batches itself",
    ),
    Idle(
        ("train.max_tokens_per_gpu",),
        lambda config: not config.train.dynamic_batch_enable,
        "without --use_dynamic_batch",
    ),
    Idle(
        ("train.micro_batch_size",),
        lambda config: config.train.dynamic_batch_enable,
        "with --use_dynamic_batch",
    ),
    Idle(
        ("data.disable_fast_tokenizer",),
        lambda config: int(version("transformers").partition(".")[0]) >= 5,
        "with transformers 5, which has fast ones only",
    ),
    Idle(
        ("ds.lora.alpha", "ds.lora.target_modules", "ds.lora.dropout"),
        lambda config: config.ds.lora.rank == 0,
        "without --lora_rank",
    ),
    Idle(
        ("ds.ring_attn_head_stride", "ds.cp_mode"),
        lambda config: config.ds.ring_attn_size == 1,
        "without --ring_attn_size",
    ),
    Idle(
        ("ds.ring_attn_head_stride",),
        lambda config: config.ds.ring_attn_size > 1 and config.ds.cp_mode == "ulysses",
        "with --cp_mode ulysses",
    ),
    Idle(
        ("ds.attn_implementation",),
        lambda config: config.ds.ring_attn_size > 1,
        "with --ring_attn_size, which has an attention of its own",
    ),
    Idle(
        ("eval.split", "eval.steps"),
        lambda config: is_blank(config.eval.dataset),
        "without --eval_dataset",
    ),
    Idle(
        ("ckpt.save_hf", "ckpt.disable_ds", "ckpt.max_num", "ckpt.max_mem"),
        lambda config: config.ckpt.save_steps <= 0,
        "without --save_steps",
    ),
    Idle(
        ("ref.offload", "reward.offload", "teacher.offload"),
        lambda config: config.ds.tensor_parallel_size > 1,
        "with --ds_tensor_parallel_size: parts of layers stay on the device",
    ),
    Idle(
        ("ds.zpg",),
        lambda config: config.ds.zero_stage != 3,
        "without --zero_stage 3",
    ),
    Idle(
        ("ds.use_universal_ckpt",),
        lambda config: not config.ckpt.load_enable,
        "without --load_checkpoint",
    ),
    Idle(
        ("logger.wandb.org", "logger.wandb.group", "logger.wandb.project"),
        lambda config: config.logger.wandb.key is None,
        "without --use_wandb",
    ),
)


def optimizer_rules(section: str = "") -> tuple[Idle, ...]:
    """What optimizer and schedule of one model do not read; `section` is where it stands in the
    tree: nothing, `actor.` or `critic.`.
    """

    def has(leaf: str, value: str) -> Callable[[Any], bool]:
        return lambda config: bool(value_at(config, f"{section}{leaf}") == value)

    def leaves(*names: str) -> tuple[str, ...]:
        return tuple(f"{section}{name}" for name in names)

    return (
        Idle(
            leaves("muon.lr", "muon.momentum", "muon.ns_steps", "muon.nesterov"),
            has("optim", "adam"),
            "without --optim muon",
        ),
        Idle(
            leaves("muon.ns_steps", "muon.nesterov"),
            has("optim", "muon"),
            "here: DeepSpeed's Muon sets it",
        ),
        Idle(
            leaves("max_norm"),
            has("optim", "muon"),
            "with --optim muon, whose steps are orthogonal: nothing is clipped",
        ),
        *(
            Idle(leaves(leaf), has("lr_scheduler", name), f"with --lr_scheduler {name}")
            for leaf, names in (
                ("min_lr_ratio", WITHOUT_LAST_RATE),
                ("lr_warmup_ratio", WITHOUT_WARMUP),
            )
            for name in names
        ),
    )


def checkpointing_rule(section: str) -> Idle:
    """A variant of something that was not asked for."""
    return Idle(
        (f"{section}.gradient_checkpointing_reentrant",),
        lambda config: not value_at(config, f"{section}.gradient_checkpointing_enable"),
        "without --gradient_checkpointing",
    )
