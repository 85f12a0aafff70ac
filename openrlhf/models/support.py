"""Features that models and machines support, found from a model's config and this machine before
weights are read; each gap is reported in one line.
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.config.common import DeepSpeedConfig
from openrlhf.errors import ConfigError
from openrlhf.utils.gpus import check_gpus
from openrlhf.utils.images import is_vision
from openrlhf.utils.packing import why_padded

# Ways of asking for attention of which torch has the kernels, on every device.
OWN_ATTENTION = ("auto", "sdpa", "eager", "flash_attention_2")
GPU_ATTENTION = ("flash_attention_3", "flash_attention_4", "flex_attention")
# Of the plans in which transformers says how layers are split: those that AutoTP follows.
SPLIT_STYLES = frozenset(
    {
        "colwise",
        "colwise_gather_output",
        "colwise_rep",
        "embedding_rowwise",
        "replicated_with_grad_allreduce",
        "rowwise",
    }
)


# Families with parameters that ranks would train apart: of an activation, of attention sinks.
UNSPLIT_FAMILIES = ("apertus", "granite_swa")
DEAF_TO_FLEX = ("opt", "afmoe")  # whose masks for flex attention know no boundaries of a row


def check_here(ds: DeepSpeedConfig, *, trains: bool = True, is_cuda: bool | None = None) -> None:
    """Raise ConfigError that lists what these settings need and this machine does not have."""
    if is_cuda is None:
        check_gpus()
        is_cuda = torch.cuda.is_available()
    problems = []
    name = ds.attn_implementation
    attention, has_kernel = f"--attn_implementation {name}", name in GPU_ATTENTION or "/" in name
    if not has_kernel and name not in OWN_ATTENTION:
        known = ", ".join((*OWN_ATTENTION, *GPU_ATTENTION))
        problems.append(f"{attention} is not known. Type one of {known}, or a kernel's hub id.")
    needs = [  # flag, True if it is used, its package, and True if it needs a GPU
        (attention, has_kernel, "torch", True),
        ("--use_liger_kernel", trains and ds.use_liger_kernel, "liger_kernel", True),
        ("--load_in_4bit", ds.load_in_4bit, "bitsandbytes", False),
        ("--deepcompile", trains and ds.deepcompile, "torch", True),
        (
            "--ds.experts_implementation deepgemm",
            ds.experts_implementation == "deepgemm",
            "kernels",
            True,
        ),
    ]
    for flag, is_used, package, needs_gpu in needs:
        lacks = [] if find_spec(package) else [f"the package {package} is not installed"]
        lacks += ["torch sees no CUDA device"] if needs_gpu and not is_cuda else []
        if is_used and lacks:
            problems.append(f"{flag}: {' and '.join(lacks)}. Mend that, or leave {flag} out.")
    is_fp16 = trains and ds.param_dtype == "fp16" and not is_cuda
    if is_fp16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        problems.append(
            "--ds.param_dtype fp16: this CPU does not train in fp16. Type --bf16 or "
            "--ds.param_dtype fp32, or run on a GPU."
        )
    if problems:
        raise ConfigError(problems)


def num_positions(config: PretrainedConfig) -> int | None:
    """Return the tokens of the longest sequence that the model reads; None where it has no limit.

    Rotary tables that change with the length of a sequence (dynamic NTK, LongRoPE) are used up to
    the length where they begin to: beyond, they would depend on the longest sequence of a row.
    """
    text = config.get_text_config()
    # An attribute: some families keep it under a name of their own (GPT-2: `n_positions`).
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None:
        return None
    scaling = getattr(text, "rope_parameters", None) or {}
    by_layer_type = [part for part in scaling.values() if isinstance(part, Mapping)]
    limits = []
    for part in by_layer_type or [scaling]:
        kind, trained = part.get("rope_type"), part.get("original_max_position_embeddings", limit)
        scaled = limit if kind == "dynamic" else max(limit, int(trained * part.get("factor", 1)))
        limits.append(trained if kind == "longrope" else scaled)
    return min(limits)


def auto_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that loads a language model, with a tower or without."""
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    return kinds[is_vision(config)]


def causal_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of a family's language models; None for code that comes with weights."""
    found = auto_class(config)._model_mapping.get(type(config), None)
    return found if isinstance(found, type) else None


def padding_note(config: PretrainedConfig, path: str) -> str | None:
    """Return the notice about the model at `path` if its rows are padded."""
    model_class = causal_class(config)
    if model_class is None or (reason := why_padded(model_class, config)) is None:
        return None
    return (
        f"{path}: {model_class.__name__} has {reason}: the sequences of a micro-batch are padded "
        "to the longest, not packed, which takes more time and memory"
    )


def refuse_unsupported(
    config: PretrainedConfig,
    path: str,
    ds: DeepSpeedConfig,
    *,
    has_token_budget: bool = False,
    has_router_loss: bool = False,
) -> None:
    """Raise ConfigError that lists the settings which a model cannot be used with; reads no
    weights.
    """
    problems = [*_split_problems(config, path, ds)]
    if is_vision(config):
        flags = {
            f"--ring_attn_size {ds.ring_attn_size}": ds.ring_attn_size > 1,
            f"--ds_tensor_parallel_size {ds.tensor_parallel_size}": ds.tensor_parallel_size > 1,
            "--use_liger_kernel": ds.use_liger_kernel,
            "--load_in_4bit": ds.load_in_4bit,
            "--attn_implementation flex_attention": ds.attention == "flex_attention",
        }
        said = f"{path} reads images, which this does not support. Leave it out."
        problems = [f"{flag}: {said}" for flag, is_used in flags.items() if is_used]
    if padding_note(config, path) is not None:
        if ds.ring_attn_size > 1:
            problems.append(
                f"--ring_attn_size {ds.ring_attn_size}: {path} cannot be shared, its rows are "
                "padded, not packed. Leave it out."
            )
        elif has_token_budget:
            problems.append(
                f"--use_dynamic_batch: the rows of {path} are padded, so a budget of tokens does "
                "not bound their memory. Leave it out and set --micro_train_batch_size."
            )
    if ds.attention == "flex_attention" and config.model_type in DEAF_TO_FLEX:
        problems.append(
            f"--attn_implementation flex_attention: in {path}, of the family {config.model_type}, "
            "the samples of a row would see each other. Leave it out."
        )
    if has_router_loss and not num_experts_per_token(config):
        problems.append(f"--aux_loss_coef is set, and {path} has no experts. Leave it out.")
    if problems:
        raise ConfigError(problems)


def _split_problems(config: PretrainedConfig, path: str, ds: DeepSpeedConfig) -> Iterator[str]:
    size, text = ds.tensor_parallel_size, config.get_text_config()
    flag = f"--ds_tensor_parallel_size {size}"
    plan = getattr(text, "base_model_tp_plan", None) or {}
    has_norms = getattr(text, "use_qk_norm", False) or getattr(text, "qk_layernorm", False)
    knows_norms = any("norm" in name for name in plan)
    is_known = plan and not set(plan.values()) - SPLIT_STYLES and (knows_norms or not has_norms)
    is_known = is_known and config.model_type not in UNSPLIT_FAMILIES
    if size > 1 and not is_known:
        yield (
            f"{flag}: {path} is of the family {config.model_type}, which DeepSpeed's AutoTP cannot "
            "split. Leave it out, and type --zero_stage 3 instead."
        )
        return
    num_ranks, remedy = size, "a divisor"
    if ds.ring_attn_size > 1 and ds.cp_mode == "ulysses":
        flag, num_ranks, remedy = "--cp_mode ulysses", ds.ranks_per_share, "--cp_mode ring"
    heads = getattr(text, "num_attention_heads", num_ranks)
    key_heads = getattr(text, "num_key_value_heads", None) or num_ranks
    if getattr(text, "multi_query", False):
        key_heads = 1
    if heads % num_ranks or key_heads % num_ranks:
        yield (
            f"{flag}: {path} has {min(heads, key_heads)} heads, not a multiple of the {num_ranks} "
            f"ranks that share them. Type {remedy}."
        )


def check_engine_split(
    config: PretrainedConfig, path: str, num_workers: int, flag: str = "vllm_tensor_parallel_size"
) -> None:
    """Raise ConfigError unless the workers of a vLLM engine can share the heads of a model."""
    num_heads = getattr(config.get_text_config(), "num_attention_heads", None) or 0
    if num_heads % num_workers:
        raise ConfigError(
            f"--{flag} {num_workers}: {path} has {num_heads} attention heads, "
            "not a multiple of it. Type a divisor."
        )


def most_workers(config: PretrainedConfig, num_gpus: int) -> int:
    """Return the most workers of a vLLM engine on these GPUs that can share a model's heads."""
    num_heads = getattr(config.get_text_config(), "num_attention_heads", None) or 0
    return max(n for n in range(1, max(num_gpus, 1) + 1) if num_heads % n == 0)


def num_experts_per_token(config: PretrainedConfig) -> int:
    """Return the experts that a token is sent to; 0 if the model has none, or does not tell."""
    family = causal_class(config)
    if family is None or "router_logits" not in (family._can_record_outputs or {}):
        return 0
    return int(config.get_text_config().to_dict().get("num_experts_per_tok") or 0)
