"""Every token of a data set held against the sizes of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from openrlhf.datasets.process_reward_dataset import ProcessRewardDataset
from openrlhf.datasets.reward_dataset import PreferenceDataset, PreferenceFormat
from openrlhf.datasets.tokenized import ModelLimits
from openrlhf.errors import DataError
from openrlhf.utils.tokenizer import Tokenizer
from tests.tiny import make_tokenizer

SOFT_HYPHEN = "\u00ad"  # its second byte is id 261, the tokenizer's last
NARROW = ModelLimits("m", num_embeddings=261, num_positions=None)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(tmp_path)


def pairs(tokenizer: Tokenizer, *sides: tuple[str, str]) -> PreferenceDataset:
    rows = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in sides]
    return PreferenceDataset(Dataset.from_list(rows), tokenizer, PreferenceFormat())


def problems(data: PreferenceDataset | ProcessRewardDataset, limits: ModelLimits) -> list[str]:
    with pytest.raises(DataError) as caught:
        data.check_fits(limits)
    return caught.value.problems


@pytest.mark.parametrize("long", [("a" * 9, "b"), ("a", "b" * 9)])
def test_either_side_of_a_pair_may_be_too_long(tokenizer: Tokenizer, long: tuple[str, str]) -> None:
    data = pairs(tokenizer, ("a", "b"), long, ("aa", "bb" * 3))
    data.check_fits(ModelLimits("m", num_embeddings=262, num_positions=10))  # 9 letters and the end
    assert problems(data, ModelLimits("m", num_embeddings=262, num_positions=6)) == [
        "2 of 3 rows are longer than the 6 positions of the model m: row 2 has 10 tokens. "
        "Type --max_len 6, or set max_position_embeddings in its config.json if it can read more."
    ]


@pytest.mark.parametrize("wide", [(SOFT_HYPHEN, "b"), ("a", SOFT_HYPHEN)])
def test_either_side_of_a_pair_may_have_an_id_too_large(
    tokenizer: Tokenizer, wide: tuple[str, str]
) -> None:
    data = pairs(tokenizer, ("a", "b"), wide, (SOFT_HYPHEN, "b"))
    [line] = problems(data, NARROW)
    assert line.startswith("row 2 has token id 261, and the model m has 261 embeddings. ")
