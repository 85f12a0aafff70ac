"""Names and shapes of weights as they stand in files, where a model holds them otherwise.

Transformers fuses some weights when it loads a model, such as the experts of a mixture; saved files
and other engines know the parts. A model without such fusions streams through untouched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

_LAYER = re.compile(r"^.*?\.\d+\.")  # "model.layers.3."


def as_stored(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as `save_pretrained` would write them, layer by layer; a layer's weights are
    copied.
    """
    if not getattr(model, "_weight_conversions", None):
        yield from tensors
        return
    layer: dict[str, Tensor] = {}
    current = ""
    for name, tensor in tensors:
        match = _LAYER.match(name)
        owner = match.group() if match else ""
        if owner != current and layer:
            yield from revert_weight_conversion(model, layer).items()
            layer = {}
        current = owner
        layer[name] = tensor.clone()
    if layer:
        yield from revert_weight_conversion(model, layer).items()
