"""Pairs: where the prompt ends, one EOS a side, and which rows are no pair. Labelled answers:
labels that are labels, and prompts that can be joined with other responses.
"""

from functools import partial

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from openrlhf.datasets.reward_dataset import PreferenceDataset
from openrlhf.datasets.tokenized import RowFormat
from openrlhf.datasets.unpaired_preference_dataset import UnpairedPreferenceDataset
from openrlhf.errors import DataError
from tests.helpers.rows import PLAIN_TEMPLATE, message
from tests.tiny import CHAT_TEMPLATE


def pairs(tokenizer, rows: list[dict], **options) -> PreferenceDataset:
    return PreferenceDataset(Dataset.from_list(rows), tokenizer, RowFormat(**options))


def shown(tokenizer, dataset: PreferenceDataset, index: int = 0) -> list[tuple[str, str]]:
    """The whole text and the targets of the chosen and of the rejected side."""
    pair = dataset[index]
    sides = [(pair.chosen_ids, pair.chosen_mask), (pair.rejected_ids, pair.rejected_mask)]
    return [(tokenizer.decode(ids), tokenizer.decode(ids[mask])) for ids, mask in sides]


user, assistant = partial(message, "user"), partial(message, "assistant")
CHAT_SIDES = [
    ("<|user|>q<|end|><|assistant|>ab<|end|>", "ab<|end|>"),
    ("<|user|>q<|end|><|assistant|>ac<|end|>", "ac<|end|>"),
]
WHOLE = {
    "chosen": [user("q"), assistant("ab")],
    "rejected": [user("q"), assistant("ac")],
}


def test_plain_answers_follow_the_prompt_inside_its_template(tokenizer):
    rows = [{"prompt": "q", "chosen": "ab", "rejected": "ac<|end|>"}]
    dataset = pairs(tokenizer, rows, prompt_key="prompt", input_template="Q: {} A: ")
    assert shown(tokenizer, dataset) == [
        ("Q: q A: ab<|end|>", "ab<|end|>"),
        ("Q: q A: ac<|end|>", "ac<|end|>"),
    ]
    assert (dataset.lengths.tolist(), dataset[0].margin) == ([22], 0.0)


@pytest.mark.parametrize("is_chat", [None, True])
def test_a_prompt_that_is_rendered_already_is_not_rendered_again(tokenizer, is_chat):
    prompt = "<|user|>q<|end|><|assistant|>"
    rows = [{"prompt": prompt, "chosen": "ab", "rejected": "ac", "is_rendered": True}]
    dataset = pairs(tokenizer, rows, prompt_key="prompt", apply_chat_template=is_chat)
    assert shown(tokenizer, dataset) == CHAT_SIDES
    token_ids = dataset[0].chosen_ids.tolist()
    assert token_ids[:1] == tokenizer.convert_tokens_to_ids(["<|user|>"])


def test_plain_dialogues_part_where_their_tokens_do(tokenizer):
    rows = [{"chosen": "Q: q A: ab", "rejected": "Q: q A: acd"}]
    assert shown(tokenizer, pairs(tokenizer, rows)) == [
        ("Q: q A: ab<|end|>", "b<|end|>"),
        ("Q: q A: acd<|end|>", "cd<|end|>"),
    ]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "ab", "rejected": "ac"},
        {"prompt": [user("q")], "chosen": [assistant("ab")], "rejected": [assistant("ac")]},
        {"prompt": "q", "chosen": [assistant("ab")], "rejected": [assistant("ac")]},
        {"prompt": "q", **WHOLE},
        WHOLE,
    ],
)
def test_every_usual_form_of_a_chat_pair_gives_the_same_sides(tokenizer, row, template):
    tokenizer.chat_template = template
    dataset = pairs(tokenizer, [row], apply_chat_template=True)
    assert shown(tokenizer, dataset) == CHAT_SIDES
    if any(isinstance(value, list) for value in row.values()):
        unasked = pairs(tokenizer, [row])
        assert shown(tokenizer, unasked) == CHAT_SIDES
        assert unasked.notices[0].endswith("read as messages, with the chat template")


def test_an_input_column_is_the_prompt_of_answers_that_lack_it(tokenizer):
    rows = [{"input": "q", "chosen": "ab", "rejected": "ac"}]
    assert shown(tokenizer, pairs(tokenizer, rows))[0] == ("qab<|end|>", "ab<|end|>")


def test_a_prompt_other_than_that_in_the_dialogues_is_said(tokenizer):
    told = "not read: 'prompt' of rows whose answers hold another prompt"
    assert len(pairs(tokenizer, [{"prompt": "q", **WHOLE}]).notices) == 1
    for asked in ("other", [message("system", "s"), user("q")]):
        assert pairs(tokenizer, [{"prompt": asked, **WHOLE}]).notices[1:] == [told]


@pytest.mark.parametrize("rejected", ["User: q Bot: c", [user("q"), assistant("c")]])
def test_a_text_without_its_prompt_is_not_blamed_on_its_last_message(tokenizer, rejected):
    rows = [{"chosen": "User: q Bot: b", "rejected": rejected}]
    with pytest.raises(DataError, match="row 1: 'chosen' is text without its prompt"):
        pairs(tokenizer, rows, apply_chat_template=True)


@pytest.mark.parametrize(
    ("chosen", "rejected", "targets"),
    [
        ("q same r x", "q same r y", ["x<|end|>", "y<|end|>"]),  # what both share is the prompt
        ("q a r b", "q c s d", ["a<|end|>b<|end|>", "c<|end|>d<|end|>"]),
    ],
)
def test_targets_are_the_assistants_turns_behind_what_dialogues_share(
    tokenizer, chosen, rejected, targets
):
    row = {
        side: [(user, assistant)[i % 2](word) for i, word in enumerate(words.split())]
        for side, words in (("chosen", chosen), ("rejected", rejected))
    }
    dataset = pairs(tokenizer, [row], apply_chat_template=True)
    assert [learnt for _, learnt in shown(tokenizer, dataset)] == targets


def test_margins_are_read_when_they_are_wanted(tokenizer):
    rows = [{"chosen": "a", "rejected": "b", "margin": m} for m in (0.5, 2)]
    assert [pairs(tokenizer, rows, with_margin=True)[i].margin for i in (0, 1)] == [0.5, 2.0]
    assert pairs(tokenizer, rows)[0].margin == 0.0
    one, other = (pairs(tokenizer, rows[i:], with_margin=True).fingerprint for i in (0, 1))
    assert one != other


@pytest.mark.parametrize("margin", [None, float("nan"), float("inf"), "nan"])
def test_margins_that_are_no_numbers_are_named(tokenizer, margin):
    good = "1" if isinstance(margin, str) else 1.0
    rows = [{"chosen": "a", "rejected": "b", "margin": m} for m in (good, margin)]
    with pytest.raises(DataError, match=r"row 2: 'margin' is '?(None|nan|inf)"):
        pairs(tokenizer, rows, with_margin=True)


def test_pairs_that_are_the_same_are_dropped_and_counted(tokenizer):
    rows = [{"chosen": "ab", "rejected": text} for text in ("ab", "ac", "ab<|end|>")]
    dataset = pairs(tokenizer, rows)
    assert dataset.row_ids == [1]
    assert dataset.notices[1:] == ["2 of 3 rows were left out: chosen and rejected are the same"]


def test_pairs_with_different_prompts_are_left_out_and_counted(tokenizer):
    def side(*words: str) -> list[dict]:
        return [(user, assistant)[i % 2](word) for i, word in enumerate(words)]

    rows = [
        {"chosen": side("q", "a"), "rejected": side("q", "b")},
        {"chosen": side("q", "a"), "rejected": side("r", "b")},
        {"chosen": [message("system", "s"), *side("q", "a")], "rejected": side("q", "b")},
        {"chosen": side("q", "a", "r", "b"), "rejected": side("q", "c", "s", "d")},
        {
            "chosen": [user("q") | {"id": "1"}, assistant("a")],
            "rejected": [user(" q") | {"id": "2"}, assistant("b")],
        },
    ]
    dataset = pairs(tokenizer, rows, apply_chat_template=True)
    assert dataset.row_ids == [0, 3, 4]
    told = "2 of 5 rows were left out: chosen and rejected have different prompts"
    assert told in dataset.notices


def test_both_responses_follow_one_prompt_where_theirs_differ_in_blanks(tokenizer):
    earlier = [user("o"), assistant("p"), user("q")]
    row = {
        "chosen": [*earlier, assistant("ab")],
        "rejected": [user(" o\n"), *earlier[1:], assistant("ac")],
    }
    start = "<|user|>o<|end|><|assistant|>p<|end|>"
    expected = [(start + text, learnt) for text, learnt in CHAT_SIDES]
    assert shown(tokenizer, pairs(tokenizer, [row])) == expected


def test_a_prompt_column_that_is_named_is_the_whole_prompt(tokenizer):
    rows = [{"instruction": "i", "input": "x", "chosen": "a", "rejected": "b"}]
    for options, prompt in (({}, "i\nx"), ({"prompt_key": "instruction"}, "i")):
        [chosen, _] = shown(tokenizer, pairs(tokenizer, rows, **options))
        assert chosen == (f"{prompt}a<|end|>", "a<|end|>")


def test_over_long_pairs_follow_the_policy(tokenizer):
    sides = [("a", "b"), ("aaa", "b"), ("b", "aab"), ("aab", "aac")]
    rows = [{"prompt": "q", "chosen": one, "rejected": two} for one, two in sides]
    options = {"prompt_key": "prompt", "max_len": 3}
    kept = pairs(tokenizer, rows, **options)
    assert (kept.row_ids, dict(kept.dropped)) == ([0], {"over-long": 3})
    cut = pairs(tokenizer, rows, overlong="truncate", **options)
    assert (cut.row_ids, cut.num_truncated) == ([0, 1, 2], 3)
    assert dict(cut.dropped) == {"chosen and rejected are the same": 1}
    assert shown(tokenizer, cut, 1) == [("qaa", "aa"), ("qb<|end|>", "b<|end|>")]
    with pytest.raises(DataError, match=r"row 2: 5 tokens, over the limit of 3"):
        pairs(tokenizer, rows, overlong="error", **options)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE])
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_side_that_met_its_limit_teaches_no_end(tokenizer, template, is_chat):
    tokenizer.chat_template = template
    row = {"prompt": "q", "chosen": "ab", "rejected": "ac", "rejected_finish_reason": "length"}
    dataset = pairs(tokenizer, [row], apply_chat_template=is_chat)
    assert [targets for _, targets in shown(tokenizer, dataset)] == ["ab<|end|>", "ac"]
    assert not shown(tokenizer, dataset)[1][0].endswith("<|end|>")


def test_texts_that_hold_the_prompt_of_an_unnamed_column_have_it_once(tokenizer):
    rows = [
        {"prompt": "Q: ", "chosen": "Q: ab", "rejected": "Q: cd"},
        {"prompt": "R: ", "chosen": "R: a", "rejected": "R: d"},
    ]
    other = {"prompt": "S: ", "chosen": "a", "rejected": "b"}
    dataset = pairs(tokenizer, rows)
    texts = [shown(tokenizer, dataset, i)[0] for i in (0, 1)]
    assert texts == [("Q: ab<|end|>", "ab<|end|>"), ("R: a<|end|>", "a<|end|>")]
    assert dataset.notices[1].startswith("column 'prompt' was not used: both answers of every row")
    twice = pairs(tokenizer, rows, apply_chat_template=True)
    assert twice.notices[1].startswith("both answers of every row hold their prompt, and the chat")
    for used in (pairs(tokenizer, rows, prompt_key="prompt"), pairs(tokenizer, [*rows, other])):
        assert shown(tokenizer, used)[0][0] == "Q: Q: ab<|end|>"


def answers(tokenizer, rows: list[dict], **options) -> UnpairedPreferenceDataset:
    return UnpairedPreferenceDataset(Dataset.from_list(rows), tokenizer, RowFormat(**options))


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


def test_what_is_shared_does_not_depend_on_ids_of_messages(tokenizer):
    shared = [user("q"), assistant("s"), user("r")]
    sides = {
        "chosen": [shared[0], {**shared[1], "id": "1"}, shared[2], assistant("ab")],
        "rejected": [shared[0], {**shared[1], "id": "2"}, shared[2], assistant("ac")],
    }
    assert [learnt for _, learnt in shown(tokenizer, pairs(tokenizer, [sides]))] == [
        "ab<|end|>",
        "ac<|end|>",
    ]


def test_answers_to_different_later_questions_are_no_pair(tokenizer):
    shared = [user("q"), assistant("s")]
    sides = {
        "chosen": [*shared, user("r"), assistant("ab")],
        "rejected": [*shared, user("t"), assistant("ac")],
    }
    dataset = pairs(tokenizer, [WHOLE, sides])
    assert len(dataset) == 1
    assert (
        "1 of 2 rows were left out: chosen and rejected have different prompts" in dataset.notices
    )


def test_answers_that_hold_their_prompt_in_some_rows_only_are_counted(tokenizer):
    rows = [{"prompt": f"q{k}", "chosen": f"q{k} a", "rejected": f"q{k} b"} for k in range(3)]
    rows.append({"prompt": "q9  ", "chosen": "q9 a", "rejected": "q9 b"})
    told = "both answers of 3 of 4 rows begin with their prompt, and it is put before them again"
    assert told in pairs(tokenizer, rows).notices


def test_labels_of_classes_are_refused(tokenizer):
    names = ["good", "bad"]
    features = Features({"input": Value("string"), "output": Value("string")})
    features["label"] = ClassLabel(names=names)
    rows = Dataset.from_dict({"input": ["q"], "output": ["a"], "label": [0]}, features=features)
    with pytest.raises(DataError, match="numbers of the classes good, bad, and which are good"):
        UnpairedPreferenceDataset(rows, tokenizer, RowFormat(output_key="output"))
