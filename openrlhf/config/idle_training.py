"""Settings of training that nothing reads, whatever is trained."""

from __future__ import annotations

from importlib.metadata import version

from openrlhf.config.checks import is_blank
from openrlhf.config.idle import Idle

IDLE_ANYWHERE = (
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
        ("logger.wandb.org", "logger.wandb.group", "logger.wandb.project"),
        lambda config: config.logger.wandb.key is None,
        "without --use_wandb",
    ),
)
