"""Linear layers split over the ranks of a group by DeepSpeed's AutoTP
(`--ds_tensor_parallel_size`).

A family's own plan in transformers says which layers are split and how. A policy's LM head is split
by rows unless it is tied to the embeddings. Embeddings, norms and all other heads stay whole.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from openrlhf.algorithms.tokens import VocabShard

if TYPE_CHECKING:
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.layers import TensorParallel_Layer


def split_layers(model: nn.Module, hf_model: nn.Module, tp_size: int) -> None:
    """Replace linear layers of the Hugging Face model inside `model` by this rank's parts of them;
    all ranks call. Whether the family can be split was asked before its weights were read.
    """
    # They decide on an accelerator while they are imported.
    from deepspeed.module_inject.auto_tp import AutoTP  # noqa: PLC0415
    from deepspeed.module_inject.autotp_config import AutoTPConfig  # noqa: PLC0415
    from deepspeed.module_inject.layers import set_autotp_mode  # noqa: PLC0415
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter  # noqa: PLC0415
    from deepspeed.utils import groups  # noqa: PLC0415

    set_autotp_mode(training=True)
    groups._init_tp_mesh_device(tensor_model_parallel_size=tp_size)
    plan = hf_model.config.get_text_config().base_model_tp_plan
    auto_tp = AutoTP(
        module=hf_model,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=AutoTPConfig(tp_size=tp_size, layer_specs=TPPlanConverter.convert(plan)),
        model_config=hf_model.config,
        training_mode=True,
    )
    auto_tp.set_tensor_parallel_config(tp_size, groups.get_tensor_model_parallel_group())
    auto_tp.update_linear_policies()
    auto_tp._replace_module(hf_model)
    if not getattr(model, "reads_whole_head", True):
        _split_head(model, hf_model, auto_tp)
    if any(p.requires_grad for p in hf_model.parameters()):
        auto_tp.register_replicated_grad_hooks(hf_model)
    model.ds_autotp_parsed = True  # DeepSpeed splits nothing when it wraps the model


def _split_head(model: nn.Module, hf_model: nn.Module, auto_tp: "AutoTP") -> None:
    """Leave this rank its rows of the LM head; one that is tied to the embeddings stays whole."""
    from deepspeed.module_inject.layers import LinearLayer  # noqa: PLC0415 - as above

    head = hf_model.get_output_embeddings()
    if head.weight is hf_model.get_input_embeddings().weight:
        return
    layer = LinearLayer(
        head, auto_tp.mp_group, name="lm_head", gather_output=True, tp_meta=auto_tp.tp_meta
    )
    hf_model.set_output_embeddings(layer)
    first = sum(layer._partition_sizes[: layer.tp_index])
    model.head.shard = VocabShard(auto_tp.mp_group, first)


@contextmanager
def whole_layers(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Make the layers of these parameters whole on every rank during the block.

    The parts keep their place in memory, which ZeRO's buffers share.
    """
    layers: dict[int, TensorParallel_Layer] = {}
    for parameter in parameters:
        if getattr(parameter, "tensor_model_parallel", False):  # AutoTP split it
            layer = parameter.gather_params.__self__
            layers[id(layer)] = layer
    parts = [(p, p.data) for layer in layers.values() for p in layer.parameters(recurse=False)]
    try:
        for layer in layers.values():
            layer.gather_params([layer.weight, layer.bias])
        yield
    finally:
        for parameter, part in parts:
            parameter.data = part
