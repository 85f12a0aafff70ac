"""How the ranks of a context group share a row, without the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import BloomConfig, LlamaConfig

from openrlhf.config.common import DeepSpeedConfig
from openrlhf.errors import ConfigError
from openrlhf.models.packing import chunk_of_row
from openrlhf.models.support import refuse_unsupported
from openrlhf.utils.context_parallel import RowSlice

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """A place in a group that nobody joins."""

    rank: int
    size: int = 2


def test_a_rank_holds_a_chunk_from_either_end():
    first, second = (RowSlice(Place(rank), num_tokens=15) for rank in range(2))  # type: ignore[arg-type]
    assert first.positions_S.tolist() == [0, 1, 2, 3, 12, 13, 14, 15]  # 15 is padding
    assert second.positions_S.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


def test_a_chunk_sees_its_sequences_from_their_beginning():
    seen, row = chunk_of_row((4, 6), range(2, 7), CPU)
    assert (seen, row.seq_lengths, row.num_earlier) == (slice(0, 7), (2, 3), 2)
    seen, row = chunk_of_row((4, 6), range(4, 10), CPU)
    assert (seen, row.seq_lengths, row.num_earlier) == (slice(4, 10), (6,), 0)
    seen, row = chunk_of_row((4, 6), range(8, 10), CPU)
    assert (seen, row.seq_lengths, row.num_earlier) == (slice(4, 10), (2,), 4)


@pytest.mark.parametrize(
    ("config", "flags", "why"),
    [
        (BloomConfig(), {}, "its rows are padded, not packed"),
        (
            LlamaConfig(num_attention_heads=8, num_key_value_heads=2),
            {"cp_mode": "ulysses"},
            "has 2 heads, not a multiple of the 4 ranks",
        ),
        (
            LlamaConfig(num_attention_heads=8, num_key_value_heads=4),
            {"cp_mode": "ulysses", "tensor_parallel_size": 2},
            "has 4 heads, not a multiple of the 8 ranks",
        ),
    ],
    ids=["padded", "heads", "heads of a part"],
)
def test_models_whose_rows_cannot_be_shared_are_refused(config, flags, why):
    with pytest.raises(ConfigError, match=why):
        refuse_unsupported(config, "m", DeepSpeedConfig(ring_attn_size=4, **flags))
    refuse_unsupported(config, "m", DeepSpeedConfig())
