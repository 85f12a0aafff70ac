"""Muon for hidden matrices, AdamW for all else: which parameter goes where, and DeepSpeed's class.

The step on a matrix is its orthogonalised momentum, whatever the size of the gradient. Gradients
are therefore not clipped: under ZeRO the orthogonalised steps would be what is clipped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from openrlhf.config.common import OptimizerConfig
from openrlhf.distributed.weights import base_model_of, hf_model_of, ids_of_matrices

logger = logging.getLogger(__name__)

Group = dict[str, object]


def muon_groups(model: nn.Module, groups: Sequence[Group], optim: OptimizerConfig) -> list[Group]:
    """Parameter groups cut in hidden matrices (first) and the rest; every parameter is marked."""
    hidden = ids_of_matrices(model) - set(map(id, embeddings_and_heads(model)))
    adam = {"lr": optim.adam.lr, "betas": optim.adam.betas, "eps": optim.adam.eps}
    muon = {"lr": optim.muon.lr, "momentum": optim.muon.momentum}
    halves: dict[bool, list[Group]] = {True: [], False: []}
    for group in groups:
        for parameter in group["params"]:
            parameter.use_muon = id(parameter) in hidden
        for use_muon, settings in ((True, muon), (False, adam)):
            params = [p for p in group["params"] if p.use_muon is use_muon]
            if params:
                own = {"params": params, "use_muon": use_muon}
                halves[use_muon].append({**group, **settings, **own})
    return halves[True] + halves[False]


def embeddings_and_heads(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of token embeddings, of the language-model head and of a value head."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield from module.parameters()
    hf_model = base_model_of(hf_model_of(model))
    if not hasattr(hf_model, "get_output_embeddings"):
        return
    head_name = hf_model.config.to_dict().get("value_head_prefix")
    heads = [hf_model.get_output_embeddings()]
    heads += [hf_model.get_submodule(head_name)] if head_name else []
    for head in heads:
        if head is not None:
            yield from head.parameters()


def make_muon(groups: list[Group], optim: OptimizerConfig, *, is_cuda: bool) -> Optimizer:
    """DeepSpeed's Muon over groups of `muon_groups`, with torch's AdamW for the rest."""
    # Imports and would compile Newton-Schulz kernels: only where Muon is used.
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam  # noqa: PLC0415

    logger.info("Muon: gradients are not clipped, --max_norm has no effect.")
    if not is_cuda:  # compiling for a CPU takes longer than it saves, and needs a C++ compiler
        torch.compiler.set_stance("force_eager")
    optimizer = MuonWithAuxAdam(
        groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"fused": True}
    )
    optimizer.defaults["lr"] = optim.adam.lr  # what schedules with an end value ask for
    return optimizer
