"""The one batch form that models see: several token sequences laid end to end in one row, with no
padding.

Knows where sequences begin, which tokens are targets, and which model families need padded rows;
does not know how attention over the row is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from openrlhf.utils.images import ImageProcessor, Images, Picture

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Batch:
    """Input of a model: tensors, and batches, that move to a device together."""

    def to(self, device: torch.device | str) -> Self:
        """Return the same batch on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        movable = Tensor | Batch | Images
        moved = {name: v.to(device) for name, v in values.items() if isinstance(v, movable)}
        return replace(self, **moved)


@dataclass(frozen=True)
class PackedBatch(Batch):
    """B sequences with T tokens in all; N of the tokens are targets (their log-prob or value is
    wanted).

    Example: [7, 8, 9] and [5, 2] are `token_ids` [7, 8, 9, 5, 2] with `seq_lengths` (3, 2).
    """

    token_ids: Tensor  # (T,) int64
    seq_lengths: tuple[int, ...]  # B lengths, summing to T
    target_mask: (
        Tensor  # (T,) bool, False on the first token of every sequence (nothing predicts it)
    )
    images: Images | None = None  # of all sequences, in their order

    @classmethod
    def from_sequences(
        cls, token_ids: Sequence[Tensor], target_masks: Sequence[Tensor]
    ) -> "PackedBatch":
        """Pack B sequences (each (T_i,) int64) and their masks (each (T_i,) bool)."""
        lengths = tuple(len(ids) for ids in token_ids)
        batch = cls(torch.cat(list(token_ids)), lengths, torch.cat(list(target_masks)).bool())
        assert not batch.target_mask[batch.cu_seqlens[:-1].long()].any(), (
            "the first token of a sequence cannot be a target"
        )
        return batch

    def with_pictures(
        self, pictures: Sequence[Sequence[Picture]], processor: ImageProcessor | None
    ) -> "PackedBatch":
        """Return the batch with the pixels of the pictures of each of its B sequences."""
        found = [picture for each in pictures for picture in each]
        if not found:
            return self
        assert processor is not None, "only models with an image processor read pictures"
        return replace(self, images=processor.pixels(found))

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Return the boundaries of the sequences, (B + 1,) int32, beginning with 0."""
        lengths = torch.tensor((0, *self.seq_lengths), dtype=torch.int32)
        return lengths.cumsum(0, dtype=torch.int32).to(self.token_ids.device)

    @cached_property
    def position_ids(self) -> Tensor:
        """Return the position of every token in its sequence, (T,) int64."""
        positions = [torch.arange(n) for n in self.seq_lengths]
        return torch.cat(positions).to(self.token_ids.device)

    @cached_property
    def predict_index(self) -> Tensor:
        """Return row positions j whose next token j + 1 is a target, (N,) int64."""
        return self.target_mask.nonzero().squeeze(-1) - 1

    @cached_property
    def targets(self) -> Tensor:
        """Return the target tokens, (N,) int64."""
        return self.token_ids[self.predict_index + 1]

    @cached_property
    def num_targets(self) -> Tensor:
        """Return the number of targets of each sequence, (B,) int64."""
        counts = torch.zeros(len(self.seq_lengths), dtype=torch.int64, device=self.token_ids.device)
        owner = torch.bucketize(self.predict_index, self.cu_seqlens[1:].long(), right=True)
        return counts.index_add_(0, owner, torch.ones_like(owner))


# The other families see padded rows, one sequence each, on every machine: a recurrent one would
# carry its state over the boundaries in a row, one with an attention of its own drops them.
PACKABLE_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
# Families whose layers do not hand the boundaries of a row on, or whose windows stand in a mask.
DEAF_FAMILIES = ("nemotron", "doge")
FAMILIES_WITH_MASKS = ("phimoe", "qwen2_moe")


def base_model_of(model: Any) -> Any:
    """Return the Hugging Face model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def attention_of(config: "PretrainedConfig") -> dict[str, str]:
    """Return the attention of a model, by "", and of each part that has a config of its own."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    found = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **found}


def is_padded(model: Any) -> bool:
    """Return True if a model, inside its adapters or bare, sees padded rows."""
    base = base_model_of(model)
    return why_padded(type(base), base.config) is not None


def why_padded(model_class: "type[PreTrainedModel]", config: "PretrainedConfig") -> str | None:
    """Return the reason why a family cannot read packed rows; None if it can."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - PACKABLE_LAYER_TYPES
    if model_class._is_stateful or kinds:
        return ", ".join(sorted(kinds)) or "recurrent layers"
    if config.model_type in DEAF_FAMILIES:
        return "layers that do not see where sequences begin"
    window = getattr(text, "sliding_window", None)
    is_narrow = window is not None and window < text.max_position_embeddings
    if config.model_type in FAMILIES_WITH_MASKS and is_narrow:
        return "sliding windows that need a mask"
    if not model_class._supports_attention_backend:
        return "an attention of its own"
    return None if model_class._supports_sdpa else "an attention that torch's kernels do not have"
