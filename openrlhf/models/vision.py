"""Inputs of vision-language models besides the tokens of a row, and the parts of one that see.

A row without pictures gets a sequence with a blank one: the ranks of ZeRO all call the tower, or
they would wait for each other.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

from openrlhf.utils.images import Images
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.vision_families import family_of, tower_of


def tower_parameters(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    """Yield the parameters of the tower and of the projector behind it."""
    tower = {*tower_of(model.config)}
    for name, parameter in model.named_parameters():
        if tower & {*name.split(".")}:
            yield parameter


def freeze_tower(model: PreTrainedModel) -> None:
    """Train the language model alone."""
    for parameter in tower_parameters(model):
        parameter.requires_grad_(requires_grad=False)


def blank_picture(config: Any) -> Images:
    """Return a picture of one token."""
    shape, grid = family_of(config).blank()
    return Images(torch.ones(shape), torch.tensor([grid]))  # some take zeros for padding


def with_blank(batch: PackedBatch, config: Any) -> PackedBatch:
    """Return a row that has pictures: itself, or one with a blank picture of one token behind it,
    a sequence of its own without a target.
    """
    if batch.images is not None:
        return batch
    return replace(
        batch,
        token_ids=torch.cat([batch.token_ids, batch.token_ids.new_tensor([config.image_token_id])]),
        seq_lengths=(*batch.seq_lengths, 1),
        target_mask=torch.cat([batch.target_mask, batch.target_mask.new_zeros(1)]),
        images=blank_picture(config).to(batch.token_ids.device),
    )


def vision_inputs(
    model: PreTrainedModel, batch: PackedBatch
) -> tuple[PackedBatch, dict[str, Tensor]]:
    """Return a row as a vision-language model reads it, and its inputs besides tokens."""
    batch = with_blank(batch, model.config)
    assert batch.images is not None, "each row has some"
    family, images = family_of(model.config), batch.images
    sees = family.inputs(images.pixels, images.grid, batch.token_ids[None])
    if family.has_grid_positions:
        sees["position_ids"] = rotary_positions(model, batch)[:, None]
    return batch, sees


def place_tiles(model: PreTrainedModel) -> None:
    """Have the patches of a tile, of Idefics3 and SmolVLM, at their places in 16 bits too, as vLLM
    has them. Transformers makes the places of fractions in the type of the pixels, which in bf16
    are those of a neighbour for four patches of ten, with 26 or 27 a side.
    """
    for module in model.modules():
        if isinstance(module, Idefics3VisionEmbeddings | SmolVLMVisionEmbeddings):
            module.forward = partial(_embedded_patches, module)


def _embedded_patches(embeddings: nn.Module, pixel_values: Tensor, **_: object) -> Tensor:
    """Return the patches of tiles, which have no margin, with their places, (tiles, P, D)."""
    patches = embeddings.patch_embedding(pixel_values)
    side = embeddings.num_patches_per_side
    down, right = (torch.arange(k, device=patches.device) * side // k for k in patches.shape[-2:])
    places = (down[:, None] * side + right).flatten()
    return patches.flatten(2).transpose(1, 2) + embeddings.position_embedding(places)


def rotary_positions(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """Return positions in time, height and width of every token in its sequence, (3, T)."""
    assert batch.images is not None, "of a row with pictures"
    ids_BT = pad_sequence(batch.token_ids.cpu().split(batch.seq_lengths), batch_first=True)
    is_token_BT = torch.arange(ids_BT.size(1)) < torch.tensor(batch.seq_lengths)[:, None]
    positions, _ = model.model.get_rope_index(
        ids_BT,
        mm_token_type_ids=(ids_BT == model.config.image_token_id).int(),
        image_grid_thw=batch.images.grid.cpu(),
        attention_mask=is_token_BT.int(),
    )
    return positions[:, is_token_BT].to(batch.token_ids.device)
