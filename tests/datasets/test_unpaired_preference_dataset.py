"""Labelled answers: labels that are labels, and prompts that can be joined with other responses."""

import pytest
from datasets import Dataset

from openrlhf.datasets.tokenized import RowFormat
from openrlhf.datasets.unpaired_preference_dataset import UnpairedPreferenceDataset
from openrlhf.errors import DataError


def answers(tokenizer, rows: list[dict], **options) -> UnpairedPreferenceDataset:
    rows_format = RowFormat(**options)
    return UnpairedPreferenceDataset(Dataset.from_list(rows), tokenizer, rows_format)


@pytest.mark.parametrize(
    "labels", [(1, 0), (True, False), (1.0, 0.0), ("1", "0"), ("True", "false"), ("1.0", "0.0")]
)
def test_a_row_has_a_prompt_a_response_and_a_label(tokenizer, labels):
    rows = [{"input": "q", "output": "ab", "label": label} for label in labels]
    dataset = answers(tokenizer, rows, output_key="output", input_template="Q: {} A: ")
    example = dataset[0]
    assert example.prompt_length == 8
    assert tokenizer.decode(example.token_ids[:8]) == "Q: q A: "
    assert tokenizer.decode(example.token_ids[example.prompt_length :]) == "ab<|end|>"
    assert example.loss_mask.tolist() == [False] * 8 + [True] * 3
    assert [dataset[i].is_desirable for i in (0, 1)] == [True, False]


def test_a_whole_dialogue_is_judged_by_its_last_message(tokenizer):
    row = {"input": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    example = answers(tokenizer, [row | {"label": 0}], apply_chat_template=True)[0]
    assert tokenizer.decode(example.token_ids[example.prompt_length :]) == "a<|end|>"


@pytest.mark.parametrize("label", [2, 0.5, float("nan"), None, "yes"])
def test_labels_other_than_1_and_0_are_named(tokenizer, label):
    good = {int: 1, str: "1"}.get(type(label), 1.0)
    rows = [{"input": "q", "output": "a", "label": value} for value in (good, label)]
    with pytest.raises(DataError, match=r"row 2: 'label' is .*; labels are 1 and 0"):
        answers(tokenizer, rows, output_key="output")


def test_labels_stay_with_their_rows_when_others_are_dropped(tokenizer):
    texts, labels = ("x", "a", "b"), (0, 1, 0)
    rows = [{"input": "q" * (9 if text == "x" else 1), "output": text, "label": label}
            for text, label in zip(texts, labels, strict=True)]  # fmt: skip
    dataset = answers(tokenizer, rows, output_key="output", input_template=None, max_len=5)
    assert dataset.row_ids == [1, 2]
    assert [dataset[i].is_desirable for i in (0, 1)] == [True, False]
    assert dataset.notices[1:] == ["1 of 3 rows were left out: over-long"]
