"""The memory that a model takes on each device of its ranks, and on the disk, worked out from its
config before any weight is read.

Weights, gradients and optimizer states are exact sums of what DeepSpeed holds. What a micro-batch
takes is an estimate from the sizes of a layer; kernels and fragments of memory add to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from openrlhf.algorithms.tokens import max_logit_rows
from openrlhf.config.base import CommandConfig, value_at, walk
from openrlhf.config.common import DeepSpeedConfig
from openrlhf.distributed.strategy import MAX_BUCKET_SIZE, ModelSize, effective_stage
from openrlhf.models.adapters import add_lora
from openrlhf.models.loading import empty_model, load_config, resolve_dtype
from openrlhf.models.support import num_experts_per_token
from openrlhf.models.vision import freeze_tower
from openrlhf.utils.memory import human_size

FP32 = 4  # bytes of a number
FOUR_BITS = 0.53  # bytes of a number in NF4, with its scales
MOMENTS = 2  # that Adam keeps of each trained number
MAX_WHOLE = 1_000_000_000  # parameters that ZeRO-3 holds whole at a time
PROCESS = 0.6e9  # of CUDA or of Python's libraries, for each process


@dataclass(frozen=True)
class Model:
    """A model of a run, and what it does there.

    Example: `Model("Qwen/Qwen2.5-7B", trains=True, num_ranks=8, num_tokens=16_384, pool="actor")`
    """

    path: str
    trains: bool = False
    scores: bool = False  # with a scalar head
    recomputes: bool = False  # activations, in the backward pass
    offload: bool = False  # its weights, to the machine's memory
    num_ranks: int = 1
    num_tokens: int = 1  # of a micro-batch
    pool: str = ""  # models of one pool share devices


@dataclass(frozen=True)
class Shape:
    """A model without its weights.

    Example: `Shape(module, model_config, torch.bfloat16, "cuda")`
    """

    module: nn.Module  # on torch's device `meta`
    config: PretrainedConfig
    dtype: torch.dtype
    device_type: str  # where it will run: cpu or cuda

    @property
    def num_parameters(self) -> int:
        """Return the number of weights."""
        return sum(p.numel() for p in self.module.parameters())

    @property
    def num_trained(self) -> int:
        """Return the number of weights that learn: those of an adapter, or all."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    def num_bytes(self, ds: DeepSpeedConfig) -> float:
        """Return the size of the weights as they are loaded."""
        whole = float(self.num_parameters * self.dtype.itemsize)
        if not ds.load_in_4bit:
            return whole
        layers = [m.weight for m in self.module.modules() if isinstance(m, nn.Linear)]
        vocab_size = self.config.get_text_config().vocab_size  # of a head, which stays as it is
        packed = sum(weight.numel() for weight in layers if len(weight) != vocab_size)
        return whole - packed * (self.dtype.itemsize - FOUR_BITS)


@dataclass(frozen=True)
class Share:
    """Bytes of a model on one device, and in the machine's memory where it is offloaded.

    Example: `Share(14e9, states=14e9, work=3e9)`: one of 8 ranks that train 7 billion weights in
    bf16 under ZeRO-2.
    """

    weights: float
    states: float = 0.0  # gradients, master weights and moments
    work: float = 0.0  # one micro-batch
    host: float = 0.0

    def times(self, number: int) -> "Share":
        """Return the share of several ranks."""
        return Share(
            *(number * value for value in (self.weights, self.states, self.work, self.host))
        )

    def in_one_memory(self) -> "Share":
        """Return the share where the device has no memory of its own."""
        return Share(self.weights, self.states + self.host, self.work)

    def in_words(self, model: Model) -> str:
        """Return the share of a rank of a model as people read it."""
        parts = {
            "weights": self.weights,
            "gradients and optimizer": self.states,
            f"micro-batch of {model.num_tokens:,} tokens": self.work,
            "offloaded": self.host,
        }
        told = " + ".join(f"{human_size(size)} {what}" for what, size in parts.items() if size)
        return f"{told}, on each of {model.num_ranks} ranks" if model.num_ranks > 1 else told


def shape_of(model: Model, command: CommandConfig, ds: DeepSpeedConfig, *, is_cuda: bool) -> Shape:
    """Return a model without weights, with its adapter if it trains with one."""
    model_config = load_config(model.path, trust_remote_code=command.trust_remote_code)
    device_type = "cuda" if is_cuda else "cpu"
    dtype = resolve_dtype(ds.param_dtype, model_config, device_type=device_type)
    module = empty_model(model_config, command, dtype=dtype, scores=model.scores)
    leaves = (each.path for each in walk(type(command)))
    flags = [path for path in leaves if path.endswith(".freeze_visual_encoder")]
    if model.trains and any(value_at(command, path) for path in flags):
        freeze_tower(module)
    learner = add_lora(module, ds.lora) if model.trains else module
    return Shape(learner, model_config, dtype, device_type)


def model_size_of(shape: Shape, model: Model, ds: DeepSpeedConfig) -> ModelSize:
    """Return the size that DeepSpeed's configuration depends on."""
    num_copies = max(model.num_ranks // ds.tensor_parallel_size, 1)  # too few ranks are refused
    return ModelSize(shape.dtype, shape.num_parameters, num_copies)


def share_of(shape: Shape, model: Model, ds: DeepSpeedConfig) -> Share:
    """Return the share of one rank of a model."""
    size, model_size = shape.dtype.itemsize, model_size_of(shape, model, ds)
    num_copies, learnt = model_size.num_copies, shape.num_trained / ds.tensor_parallel_size
    weights = shape.num_bytes(ds) / ds.tensor_parallel_size
    work = activations(shape, model, ds)
    if not model.trains:
        ds = ds.model_copy(update={"adam_offload": False})
    stage = effective_stage(ds, model_size)
    offload = model.offload and ds.tensor_parallel_size == 1 and not ds.load_in_4bit
    if not model.trains:
        stage = 3 if offload or stage == 3 else 0
    if stage == 3:
        weights /= num_copies
        work += size * min(MAX_WHOLE, shape.num_parameters)
    if not model.trains:
        host = weights if offload else 0.0
        return Share(weights - host, 0.0, work, host)
    gradients, states = FP32 * learnt, FP32 * MOMENTS * learnt
    if stage > 0:  # ZeRO keeps master weights in fp32, and moves gradients in buckets
        states = (states + FP32 * learnt) / num_copies
        work += 2 * size * min(MAX_BUCKET_SIZE, learnt)
    if stage > 1:
        gradients /= num_copies
    # Stages below 3 sum gradients in fp32 on the device, which weights in 16 bits need.
    is_summed_there = stage < 3 and size < FP32 and ds.grad_accum_dtype in (None, "fp32")
    host = 0.0
    if ds.adam_offload:
        host = states if is_summed_there else gradients + states
    return Share(weights, gradients + states - host, work, host)


def peaks_of(
    shares: Sequence[Share], *, engine: float, engine_sleeps: bool, states_sleep: bool
) -> tuple[float, float]:
    """Return the most bytes that models and an engine on one device take at a time: those that are
    certain, and all of them with micro-batches.
    """
    held = sum(s.weights + (0 if states_sleep else s.states) for s in shares)
    certain = peak = held + engine
    for share in shares:
        busy = held + (share.states if states_sleep else 0) + (0 if engine_sleeps else engine)
        certain, peak = max(certain, busy), max(peak, busy + share.work)
    return certain, peak


def cache_bytes_per_token(shape: Shape) -> int:
    """Return the bytes of keys and values of a token in an engine."""
    text = shape.config.get_text_config()
    return 2 * text.num_hidden_layers * _key_size(text) * shape.dtype.itemsize


def _num_heads(text: PretrainedConfig) -> int:
    return int(getattr(text, "num_attention_heads", None) or 1)  # Mamba has none


def _head_size(text: PretrainedConfig) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // _num_heads(text))


def _key_size(text: PretrainedConfig) -> int:
    return _head_size(text) * int(getattr(text, "num_key_value_heads", None) or _num_heads(text))


def activations(shape: Shape, model: Model, ds: DeepSpeedConfig) -> float:
    """Return the bytes of a forward pass over a micro-batch: what is kept of every layer for the
    backward pass, its input alone where that recomputes; the logits of a chunk; and the sum in fp32
    of the gradient of a head in half precision.
    """
    text, size = shape.config.get_text_config(), shape.dtype.itemsize
    hidden, queries = text.hidden_size, _head_size(text) * _num_heads(text)
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    if num_chosen := num_experts_per_token(shape.config):
        inner = num_chosen * (getattr(text, "moe_intermediate_size", None) or inner)
    # Two norms, which compute in fp32; inputs of the projections; queries, keys, values and their
    # mix; gate, up, their product and the activation of the MLP.
    wide = 2 * hidden + 2 * queries + 2 * _key_size(text) + 4 * inner
    layer = (2 * (FP32 + size) * hidden + size * wide) / ds.tensor_parallel_size
    kept = 0.0
    if model.trains:
        kept = text.num_hidden_layers * (size * hidden if model.recomputes else layer)
        kept += (FP32 + 2 * size) * hidden  # the last norm and the input of the head
        layer = layer if model.recomputes else 0.0
    num_tokens = model.num_tokens / ds.ring_attn_size
    num_rows = min(max_logit_rows(shape.device_type), num_tokens)
    num_logits = num_rows * text.vocab_size / ds.tensor_parallel_size
    learns_head = model.trains and not model.scores and not ds.lora.rank and size < FP32
    head = learns_head * FP32 * hidden * text.vocab_size / ds.tensor_parallel_size
    return (kept + layer) * num_tokens + 2 * FP32 * num_logits + head
