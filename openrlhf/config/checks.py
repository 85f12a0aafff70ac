"""Rules that several commands share.

Each yields one line for a problem: what is wrong, the value, what to type.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from openrlhf.config.common import DeepSpeedConfig, OptimizerConfig, TrainedModelConfig

# The names of transformers.SchedulerType; written out because importing transformers takes seconds.
SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "greedy",
)


def batch_problems(micro_batch_size: int, batch_size: int) -> Iterator[str]:
    """A micro-batch cannot hold more than the batch it is a part of."""
    if micro_batch_size > batch_size:
        yield (
            f"--micro_train_batch_size {micro_batch_size} is more than --train_batch_size "
            f"{batch_size}. Type --micro_train_batch_size {batch_size} or "
            f"--train_batch_size {micro_batch_size}."
        )


def schedule_problems(name: str) -> Iterator[str]:
    """The schedule is one that transformers has."""
    if name not in SCHEDULERS:
        near = get_close_matches(name, SCHEDULERS, n=1)
        remedy = f"--lr_scheduler {near[0]}" if near else f"one of {', '.join(SCHEDULERS)}"
        yield f"--lr_scheduler is not a known schedule: {name}. Type {remedy}."


def router_loss_problems(coef: float, model: TrainedModelConfig) -> Iterator[str]:
    """The reentrant variant of checkpointing runs layers without a graph."""
    is_reentrant = model.gradient_checkpointing_enable and model.gradient_checkpointing_reentrant
    if coef > 0 and is_reentrant:
        yield (
            "--aux_loss_coef with --gradient_checkpointing_use_reentrant: the router loss "
            "would have no gradient. Type --gradient_checkpointing alone."
        )


def weight_problems(ds: DeepSpeedConfig, *optims: OptimizerConfig) -> Iterator[str]:
    """Weights of these types, split like this, can be trained and loaded again."""
    is_muon = any(optim.optim == "muon" for optim in optims)
    split = f"--ds_tensor_parallel_size {ds.tensor_parallel_size}"
    is_split = ds.tensor_parallel_size > 1
    if ds.load_in_4bit:
        yield from four_bit_problems(ds, can_learn=ds.lora.rank > 0)
    if ds.param_dtype == "fp32" and ds.grad_accum_dtype in ("bf16", "fp16"):
        yield (
            f"--grad_accum_dtype {ds.grad_accum_dtype} with fp32 parameters: add --bf16 or leave "
            "it out."
        )
    if ds.use_universal_ckpt and is_muon:
        yield (
            "--use_ds_universal_ckpt with --optim muon: DeepSpeed converts the states of Adam "
            "only. Leave --use_ds_universal_ckpt out, and start as many ranks as before."
        )
    if is_split and ds.zero_stage == 3:
        yield f"{split} with --zero_stage 3: it splits weights too. Type --zero_stage 2."
    if is_split and is_muon:
        yield f"{split} with --optim muon: its steps need whole matrices. Type --optim adam."
    others = {"--lora_rank": ds.lora.rank > 0, "--load_in_4bit": ds.load_in_4bit}
    for flag, is_there in (others | {"--deepcompile": ds.deepcompile}).items():
        if is_split and is_there:
            yield f"{split} with {flag}: not supported. Leave one of the two out."
    if ds.deepcompile and ds.zero_stage == 0:
        yield "--deepcompile with --zero_stage 0: it compiles ZeRO 1 to 3. Type --zero_stage 2."
    if ds.deepcompile and ds.ring_attn_size > 1:
        yield f"--deepcompile with --ring_attn_size {ds.ring_attn_size}: leave one of the two out."


def four_bit_problems(ds: DeepSpeedConfig, *, can_learn: bool) -> Iterator[str]:
    """Weights of 4 bits stay whole, and only an adapter on them can learn."""
    if not can_learn:
        yield (
            "--load_in_4bit trains adapters, and --lora_rank is 0. Add --lora_rank 16 or leave "
            "--load_in_4bit out."
        )
    if ds.zero_stage == 3:
        yield (
            "--load_in_4bit with --zero_stage 3: 4-bit weights cannot be split over ranks. "
            "Type --zero_stage 2."
        )
