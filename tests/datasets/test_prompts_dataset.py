"""Prompts: one BOS, nothing cut in silence, every bad row named."""

from datetime import date

import pytest
from datasets import Dataset

from openrlhf.datasets.loading import load_rows
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.tokenized import RowFormat
from openrlhf.errors import ConfigError, DataError
from tests.helpers.tokenizers import BOS, bos_tokenizer
from tests.tiny import write_jsonl


def prompts(tokenizer, rows: list[dict], **options) -> PromptDataset:
    return PromptDataset(Dataset.from_list(rows), tokenizer, RowFormat(**options))


def test_a_record_holds_text_ids_label_source_and_the_other_columns(tokenizer):
    rows = [{"input": "2+2=", "answer": "4", "datasource": "math", "level": 3}]
    record = prompts(tokenizer, rows, label_key="answer")[0]
    assert (record.row_id, record.prompt_text, record.label) == (0, "2+2=", "4")
    assert record.prompt_token_ids == tuple(tokenizer("2+2=").input_ids)
    assert record.datasource == "math"
    assert record.columns == {"answer": "4", "datasource": "math", "level": 3}


@pytest.mark.parametrize(
    ("spec", "sources"),
    [
        ("one.jsonl", ["default", "default"]),
        ("one.jsonl,two.jsonl", ["one", "one", "own", "two"]),
        ("one.jsonl,folder/one.jsonl", ["one_1", "one_1", "one_2"]),
        ("folder", ["default"]),
    ],
)
def test_a_row_without_a_source_has_the_name_of_its_data_set_among_several(
    spec, sources, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    write_jsonl("one.jsonl", [{"input": "1+1="}, {"input": "2+2="}])
    write_jsonl("two.jsonl", [{"input": "3+3=", "datasource": "own"}, {"input": "4+4="}])
    write_jsonl("folder/one.jsonl", [{"input": "5+5="}])
    dataset = PromptDataset(load_rows(spec), tokenizer, RowFormat())
    assert [dataset[i].datasource for i in range(len(dataset))] == sources


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("hi", "<|user|>hi<|end|><|assistant|>"),
        ([{"role": "user", "content": "hi"}], "<|user|>hi<|end|><|assistant|>"),
        (
            [
                {"from": "system", "value": "s", "role": None, "content": None},
                {"from": "human", "value": "hi"},
            ],
            "<|system|>s<|end|><|user|>hi<|end|><|assistant|>",
        ),
        (
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "answer"}],
            "<|user|>hi<|end|><|assistant|>",
        ),
    ],
)
def test_text_and_message_lists_are_rendered_by_the_chat_template(tokenizer, value, text):
    dataset = prompts(tokenizer, [{"input": value}], apply_chat_template=True)
    assert dataset[0].prompt_text == text
    assert tokenizer.decode(dataset[0].prompt_token_ids) == text


def test_text_stands_in_the_template_and_a_usual_column_is_said(tokenizer):
    dataset = prompts(tokenizer, [{"prompt": "{hi}"}], input_template="Q: {} {{}} A:")
    assert (dataset[0].prompt_text, dataset[0].label) == ("Q: {hi} {} A:", "")
    assert dataset.notices == ["'prompt' read as text, with --input_template 'Q: {} {{}} A:'"]
    rows = [{"prompt": "a", "question": "b"}]
    assert prompts(tokenizer, rows, input_key="question")[0].prompt_text == "b"
    with pytest.raises(ConfigError, match=r"--input_template.*Write other braces twice"):
        prompts(tokenizer, [{"input": "hi"}], input_template="{a} {}")


@pytest.mark.parametrize("template_adds_bos", [True, False])
@pytest.mark.parametrize("apply_chat_template", [True, False])
def test_exactly_one_bos_where_tokenizer_adds_it(template_adds_bos, apply_chat_template):
    fake = bos_tokenizer(adds_bos=True, template_adds_bos=template_adds_bos)
    dataset = prompts(fake, [{"input": "<s>hi"}], apply_chat_template=apply_chat_template)
    ids = dataset[0].prompt_token_ids
    assert ids[0] == BOS and ids.count(BOS) == 1


def test_truncate_left_keeps_the_end_and_the_bos():
    rows = [{"input": "abcdef"}, {"input": "abc"}]
    dataset = prompts(bos_tokenizer(adds_bos=True), rows, max_len=4, overlong="truncate_left")
    assert dataset[0].prompt_text == "<s>def"
    assert dataset[0].prompt_token_ids[0] == BOS and len(dataset[0].prompt_token_ids) == 4
    assert dataset[1].prompt_text == "abc"
    assert dataset.num_truncated == 1 and not dataset.dropped


@pytest.mark.parametrize("column", ["prompt", "messages", "conversations"])
def test_dialogues_are_rendered_without_a_flag_and_that_is_said(tokenizer, column):
    rows = [{column: None}, {column: [{"role": "user", "content": "hi"}]}]
    dataset = prompts(tokenizer, rows[1:])
    assert dataset[0].prompt_text == "<|user|>hi<|end|><|assistant|>"
    assert dataset.notices == [f"'{column}' read as messages, with the chat template"]
    with pytest.raises(DataError, match="row 1: NoneType instead of text or a message list"):
        prompts(tokenizer, rows)
    text = prompts(tokenizer, [{column: "hi"}], apply_chat_template=True)
    assert text[0].prompt_text == "<|user|>hi<|end|><|assistant|>"
    assert text.notices == [f"'{column}' read as text, put into the chat template"]


@pytest.mark.parametrize(
    ("value", "is_chat", "message"),
    [
        ("  ", False, "row 2: 'input' is empty"),
        (None, False, "row 2: 'input' is missing"),
        ([{"role": "user", "content": " "}], True, "row 2: 'input' is empty"),
        ([{"role": "boss", "content": "x"}], True, "row 2: unknown role 'boss'"),
        ([{"type": "text", "text": "x"}], True, "no role, only 'type', 'text'; parts stand in"),
        ([{"content": "x", "role": None}], True, "row 2: a message has no role, only 'content'$"),
        (
            [{"role": "user", "content": None}],
            True,
            "row 2: a message of role user without content",
        ),
        ([{"role": "assistant"}], True, "row 2: a message of role assistant without content"),
    ],
)
def test_rows_that_say_nothing_are_named(tokenizer, value, is_chat, message):
    rows = [{"input": [{"role": "user", "content": "x"}] if is_chat else "x"}, {"input": value}]
    with pytest.raises(DataError, match=message):
        prompts(tokenizer, rows, apply_chat_template=is_chat)


@pytest.mark.parametrize("label", [None, float("nan")])
def test_missing_and_nan_labels_are_named(tokenizer, label):
    rows = [{"input": "a", "label": 1.0}, {"input": "b", "label": label}]
    with pytest.raises(DataError, match=r"row 2: 'label' is"):
        prompts(tokenizer, rows, label_key="label")


def test_a_template_that_does_not_end_is_cut_off(tokenizer, monkeypatch):
    monkeypatch.setattr("openrlhf.utils.tokenizer.RENDER_S", 0.2)
    loops = "{% for i in range(99999) %}{% for i in range(200) %}"  # a second or two: no more
    tokenizer.chat_template = loops + "{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"template takes longer than 0.2 s to write one dialo"):
        prompts(tokenizer, [{"input": "x"}], apply_chat_template=True)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 9 ** 9 ** 9 }}", r"it has the operator \*\*"),
        ("{% for i in range(10000000000) %}{% endfor %}", "Range too big"),
        ("{{ 'x' * 99999999999999 }}", "MemoryError"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", ""),  # templates run in a sandbox
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ],
)
def test_a_template_that_asks_too_much_is_refused(template, reason, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=rf"the chat template refuses it: {reason}"):
        prompts(tokenizer, [{"input": "x"}], apply_chat_template=True)


def test_the_fingerprint_changes_with_the_data(tokenizer):
    one, same, other = (prompts(tokenizer, [{"input": text}]) for text in ("a", "a", "b"))
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert one.lengths.tolist() == [1]
    labelled = [
        prompts(tokenizer, [{"input": "a", "label": label}], label_key="label") for label in "11 2"
    ]
    assert labelled[0].fingerprint == labelled[1].fingerprint != labelled[3].fingerprint


def test_the_fingerprint_changes_with_what_reward_functions_may_read(tokenizer):
    rows = [{"input": "2+2", "answer": answer, "day": date(2026, 1, 1)} for answer in "445"]
    one, same, other = (prompts(tokenizer, [row]).fingerprint for row in rows)
    assert one == same != other


def test_a_template_that_does_not_parse_is_one_problem_that_names_its_flag(tokenizer):
    tokenizer.chat_template = "{% for message in messages %}{{ message"
    with pytest.raises(ConfigError, match=r"line 1: .*--tokenizer_chat_template") as caught:
        prompts(tokenizer, [{"input": "q"}] * 3, apply_chat_template=True)
    assert len(caught.value.problems) == 1
