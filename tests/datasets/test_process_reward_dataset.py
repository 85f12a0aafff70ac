"""Judged steps: markers, their labels, and every way in which the two do not fit."""

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value

from openrlhf.datasets.process_reward_dataset import ProcessRewardDataset
from openrlhf.datasets.tokenized import RowFormat
from openrlhf.errors import ConfigError, DataError
from tests.helpers.tokenizers import BOS, bos_tokenizer


def steps(tokenizer, rows: list[dict], **options) -> ProcessRewardDataset:
    options = {"placeholder_token": "#", "reward_tokens": ("+", "-"), **options}
    return ProcessRewardDataset(Dataset.from_list(rows), tokenizer, RowFormat(**options))


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text).input_ids


def test_hard_labels_are_tokens_at_the_markers(tokenizer):
    dataset = steps(tokenizer, [{"input": "1+1 a# b#", "label": ["+", "-"]}])
    example = dataset[0]
    assert tokenizer.decode(example.token_ids) == "1+1 a# b#"
    assert example.marker_mask.nonzero().flatten().tolist() == [5, 8]
    assert example.labels.tolist() == [*ids(tokenizer, "+"), *ids(tokenizer, "-")]
    assert example.labels.dtype == torch.int64 and not example.is_soft
    assert dataset.reward_token_ids == tuple(example.labels.tolist())


def test_soft_labels_are_shares_of_the_first_reward_token(tokenizer):
    example = steps(tokenizer, [{"input": "a#b#c#", "label": [0.25, 1, 0]}])[0]
    assert example.labels.tolist() == [0.25, 1.0, 0.0]
    assert example.labels.dtype == torch.float32 and example.is_soft


def test_without_reward_tokens_any_single_token_is_a_label(tokenizer):
    row = {"input": "a#b#", "label": ["x", "y"]}
    example = steps(tokenizer, [row], reward_tokens=())[0]
    assert example.labels.tolist() == ids(tokenizer, "xy")


@pytest.mark.parametrize(("is_trusted", "others"), [(True, ["<|user|>"]), (False, [])])
def test_a_special_token_may_be_the_marker_whatever_others_are(tokenizer, is_trusted, others):
    row = {"input": "a<|tool|>b<|user|>c<|tool|>", "label": ["+", "-"]}
    options = {"placeholder_token": "<|tool|>", "allow_special_tokens": is_trusted}
    example = steps(tokenizer, [row], **options)[0]
    special = [i for i in example.token_ids.tolist() if i in tokenizer.all_special_ids]
    assert tokenizer.convert_ids_to_tokens(special) == ["<|tool|>", *others, "<|tool|>"]
    assert int(example.marker_mask.sum()) == 2


def test_a_text_begins_with_one_bos_and_gets_no_eos():
    example = steps(bos_tokenizer(adds_bos=True), [{"input": "a#", "label": ["+"]}])[0]
    assert example.token_ids.tolist()[0] == BOS and len(example.token_ids) == 3
    assert example.marker_mask.tolist() == [False, False, True]


def test_stepwise_columns_are_joined_with_the_marker(tokenizer):
    row = {"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}
    dataset = steps(tokenizer, [row])
    assert tokenizer.decode(dataset[0].token_ids) == "q\na#\nb#"
    assert dataset[0].labels.tolist() == list(dataset.reward_token_ids)
    said = "'prompt' and 'completions' and 'labels' read as steps and their labels"
    assert dataset.notices == [said]
    with pytest.raises(DataError, match=r"row 1: 'completions' holds the step marker '#' itself"):
        steps(tokenizer, [{"prompt": "q", "completions": ["a#"], "labels": [True]}])
    with pytest.raises(ConfigError, match="the line break that stands between steps anyway"):
        steps(tokenizer, [row], placeholder_token="\n")


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (["+"], {}, "2 step markers '#' but 1 labels"),
        (["+", "?"], {}, r"unknown label '\?'; --reward_tokens are \+, -"),
        (["+", None], {}, "label None is neither a token nor a number"),
        ([0.5, 1.5], {}, "soft label 1.5 is not from 0 to 1"),
        ([0.5, float("nan")], {}, "soft label nan is not"),
        (None, {}, "'label' is NoneType, not a list"),
        ("+-", {}, "'label' is str, not a list"),
        ([0.5, 1.0], {"reward_tokens": ("+",)}, ".* exactly two --reward_tokens, not 1"),
        ([0.5, 1.0], {"reward_tokens": ("+", "-", "0")}, ".* exactly two --reward_tokens, not 3"),
        (["xy", "x"], {"reward_tokens": ()}, "label 'xy' is 2 tokens, not one"),
    ],
)
def test_labels_that_do_not_fit_are_named(tokenizer, labels, options, message):
    with pytest.raises(DataError, match=f"row 1: {message}"):
        steps(tokenizer, [{"input": "a#b#", "label": labels}], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placeholder_token": "##"}, "--placeholder_token '##' is 2 tokens .* not one"),
        ({"placeholder_token": ""}, "--placeholder_token '' is 0 tokens"),
        ({"reward_tokens": ("good", "-")}, "--reward_tokens 'good' is 4 tokens"),
    ],
)
def test_markers_and_reward_tokens_are_single_tokens(tokenizer, options, message):
    with pytest.raises(ConfigError, match=message):
        steps(tokenizer, [{"input": "a#", "label": ["+"]}], **options)


def test_a_cut_text_loses_the_labels_of_its_markers(tokenizer):
    rows = [{"input": "a#b#", "label": ["+", "-"]}, {"input": "abcd#", "label": ["+"]}]
    dataset = steps(tokenizer, rows, max_len=3, overlong="truncate")
    assert dataset[0].labels.tolist() == ids(tokenizer, "+")
    assert dict(dataset.dropped) == {"nothing to learn": 1}


def test_numbers_of_classes_are_no_labels(tokenizer):
    features = Features({"input": Value("string"), "label": List(ClassLabel(names=["+", "-"]))})
    rows = Dataset.from_dict({"input": ["1+1<|step|>"], "label": [[0]]}, features=features)
    with pytest.raises(DataError, match=r"'label' holds the numbers of the classes \+, -, and"):
        ProcessRewardDataset(rows, tokenizer, RowFormat(placeholder_token="<|step|>"))
