"""What a row holds is read by its meaning, or said not to be read."""

import csv
import json
from pathlib import Path

import pytest
from datasets import Dataset

from openrlhf.config.base import Caution
from openrlhf.datasets.chat import to_messages
from openrlhf.datasets.loading import load_rows
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.reward_dataset import PreferenceDataset
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.datasets.tokenized import RowFormat, repeats, write_bad_rows
from openrlhf.datasets.unpaired_preference_dataset import UnpairedPreferenceDataset
from openrlhf.errors import ConfigError, DataError
from openrlhf.utils.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import CHAT_TEMPLATE, make_tokenizer, write_jsonl

ALPACA = {"instruction": "To French", "input": "cat", "output": "chat"}
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
ASKED = [{"role": "user", "content": "q"}]
DIALOGUE = [*ASKED, {"role": "assistant", "content": "a"}]


def sft(tokenizer: Tokenizer, *rows: dict, **options: object) -> tuple[str, list[str]]:
    """The text of the first example, and the notices."""
    form = RowFormat(**{"usual_output": "output", "pretrain_mode": None, **options})
    data = SFTDataset(Dataset.from_list([*rows]), tokenizer, form)
    return tokenizer.decode(data[0].token_ids), data.notices


def prompt(tokenizer: Tokenizer, row: dict, **options: object) -> tuple[str, list[str]]:
    data = PromptDataset(Dataset.from_list([row]), tokenizer, RowFormat(**options))
    return data[0].prompt_text, data.notices


def test_alpacas_three_columns_are_read(tokenizer):
    text, notices = sft(tokenizer, ALPACA)
    assert text == "To French\ncatchat<|end|>"
    assert notices == ["'instruction' and 'input' and 'output' read as text"]
    assert prompt(tokenizer, ALPACA)[0] == "To French\ncat"
    assert sft(tokenizer, {**ALPACA, "input": ""})[0] == "To Frenchchat<|end|>"
    assert sft(tokenizer, ALPACA, usual_output=None)[0] == text  # of `sft`, which names none
    record = PromptDataset(Dataset.from_list([ALPACA]), tokenizer, RowFormat())[0]
    assert record.source == "To French\ncat"
    assert record.columns == {"input": "cat", "output": "chat"}


def test_the_remedy_for_other_response_columns_keeps_the_instruction(tokenizer):
    row = {"instruction": "To French", "input": "cat", "response": "chat"}
    with pytest.raises(DataError, match=r"Type --output_key response\.$"):
        sft(tokenizer, row)
    assert sft(tokenizer, row, output_key="response")[0] == "To French\ncatchat<|end|>"


def test_a_system_column_and_a_history_stand_before_the_dialogue(tokenizer):
    row = {"conversations": SHAREGPT, "system": "Be terse.", "history": [["a", "b"]]}
    asked = "<|system|>Be terse.<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|>hi<|end|>"
    text, notices = sft(tokenizer, row)
    assert text == f"{asked}<|assistant|>yo<|end|>"
    assert notices[0].startswith("'conversations' and 'system' and 'history' read as")
    assert prompt(tokenizer, row)[0] == f"{asked}<|assistant|>"
    data = PromptDataset(Dataset.from_list([row]), tokenizer, RowFormat())
    assert [m["role"] for m in data[0].source] == ["system", "user", "assistant", "user"]
    assert data.asked(0) == data[0].source


def test_a_system_column_of_pairs_stands_before_their_question(tokenizer):
    row = {"system": "Be terse.", "question": "hi", "chosen": "yo", "rejected": "no"}
    form = RowFormat(apply_chat_template=True)
    data = PreferenceDataset(Dataset.from_list([row]), tokenizer, form)
    asked = "<|system|>Be terse.<|end|><|user|>hi<|end|>"
    assert tokenizer.decode(data[0].chosen_ids) == f"{asked}<|assistant|>yo<|end|>"
    worse = [SHAREGPT[0], {"from": "gpt", "value": "no"}]
    whole = {"system": "Be terse.", "chosen": SHAREGPT, "rejected": worse}
    data = PreferenceDataset(Dataset.from_list([whole]), tokenizer, RowFormat())
    assert tokenizer.decode(data[0].rejected_ids) == f"{asked}<|assistant|>no<|end|>"


def test_a_system_column_that_gives_way_to_a_system_message_is_said(tokenizer):
    messages = [{"role": "system", "content": "Be kind."}, *DIALOGUE]
    text, notices = sft(tokenizer, {"messages": messages, "system": "Be terse."})
    asked = "<|system|>Be kind.<|end|><|user|>q<|end|>"
    assert text == f"{asked}<|assistant|>a<|end|>"
    assert notices[1] == "not read: 'system' of rows with a system message"
    told = prompt(tokenizer, {"messages": messages, "system": "Be terse."})
    assert told[0] == f"{asked}<|assistant|>"
    unread = notices[1].removeprefix("not read: ")
    assert told[1][1] == f"not read: {unread}, answers at the end of prompts"
    for same in ("Be kind.", [{"type": "text", "text": "Be kind."}]):
        assert len(sft(tokenizer, {"messages": messages, "system": same})[1]) == 1


CALLS = CHAT_TEMPLATE.replace(
    "message['content'] }}<|end|>{% end", "(message.tool_calls or message.content)|tojson }}{% end"
)


def test_nulls_of_a_file_are_learnt_and_those_that_a_table_fills_in_are_not(tokenizer, tmp_path):
    tokenizer.chat_template = f"{{{{ tools|tojson }}}}{CALLS}"
    found = [{"city": "Bonn", "unit": None}, {"days": 1}]
    rows = []
    for arguments in found:
        called = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
        rows.append({"messages": [*ASKED, called], "tools": [{"name": "f", "default": None}]})
    path, table = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "rows.parquet"
    Dataset.from_list(rows).to_parquet(table)
    filled = [{"city": "Bonn"}, {"days": 1}]
    for spec, expected in ((path, found), (table, filled), (f"{table},{path}", filled + found)):
        data = SFTDataset(load_rows(str(spec)), tokenizer, RowFormat())
        texts = [tokenizer.decode(data[i].token_ids) for i in range(len(data))]
        for text, arguments in zip(texts, expected, strict=True):
            assert f'"arguments": {json.dumps(arguments)}' in text
        has_null = ['"default": null' in text for text in texts]
        assert has_null == ([True] * 2 if spec == path else [False] * 2 + [True] * len(texts[2:]))


def test_message_lists_in_cells_of_a_csv_file_are_messages(tokenizer, tmp_path):
    path, cells = tmp_path / "rows.csv", csv.writer
    with path.open("w", newline="") as file:
        cells(file).writerows([["messages", "system"], [json.dumps(DIALOGUE), "Be terse."]])
    rows, asked = load_rows(str(path)), "<|system|>Be terse.<|end|><|user|>q<|end|><|assistant|>"
    for form in (RowFormat(), RowFormat(apply_chat_template=True, multiturn=True)):
        data = SFTDataset(rows, tokenizer, form)
        assert tokenizer.decode(data[0].token_ids) == f"{asked}a<|end|>"
    prompts = PromptDataset(rows, tokenizer, RowFormat())
    assert prompts[0].prompt_text == asked
    assert (
        prompts[0].source
        == prompts.asked(0)
        == [{"role": "system", "content": "Be terse."}, *ASKED]
    )
    one = {"prompt": json.dumps(ASKED)}
    assert prompt(tokenizer, one)[0] == "<|user|>q<|end|><|assistant|>"
    for other in ('[{"from": "Rome", "to": "Oslo"}]', "[{'from': 'Rome', 'to': 'Oslo'}]"):
        assert prompt(tokenizer, {"prompt": other})[0] == other
    row = {
        "input": '[{"value": 1}]',
        "label": json.dumps(DIALOGUE),
    }  # neither is a prompt of messages
    data = PromptDataset(Dataset.from_list([row]), tokenizer, RowFormat(label_key="label"))
    assert (data[0].prompt_text, data[0].label) == (row["input"], row["label"])


def test_a_message_list_in_pythons_notation_is_refused_by_its_row(tokenizer, tmp_path):
    rows = Dataset.from_list([{"messages": str(DIALOGUE)}])
    told = "row 1: a message list that cannot be read as JSON: .*Write it with json.dumps"
    for options in ({}, {"apply_chat_template": False}, {"apply_chat_template": True}):
        with pytest.raises(DataError, match=told):
            PromptDataset(rows, tokenizer, RowFormat(**options))
    text = "Look at [{'role': 'user', 'content': 'q'}]: what is it?"
    assert prompt(tokenizer, {"prompt": text})[0] == text
    good = {"messages": json.dumps(DIALOGUE)}
    rows = Dataset.from_list([good, *rows])
    data = PromptDataset(rows, tokenizer, RowFormat(bad_rows="skip"))
    write_bad_rows(tmp_path / "bad.jsonl", data)
    assert json.loads((tmp_path / "bad.jsonl").read_text())["row"] == rows[1]


@pytest.mark.parametrize("history", ['[["a", "b"]]', [{"role": "user", "content": "a"},
                         {"role": "assistant", "content": "b"}]])  # fmt: skip
def test_a_history_may_be_json_text_or_messages(tokenizer, history):
    text, _ = sft(tokenizer, {"conversations": SHAREGPT, "history": history})
    assert text.startswith("<|user|>a<|end|><|assistant|>b<|end|><|user|>hi<|end|>")


def test_a_history_that_is_not_read_refuses_no_row(tokenizer):
    row = {"prompt": "q", "completion": "a", "history": str(DIALOGUE)}
    for text, notices in (sft(tokenizer, row), prompt(tokenizer, row)):
        assert text in ("qa<|end|>", "q") and notices[1] == "not read: 'history'"


@pytest.mark.parametrize("history", ["ab", ["ab"], [["a", "b", "c"]]])
def test_another_history_is_refused_by_its_row(tokenizer, history):
    with pytest.raises(
        DataError, match=r"row 1: 'history' (cannot be read as JSON|is no list of pairs)"
    ):
        sft(tokenizer, {"conversations": SHAREGPT, "history": history})


def test_keys_beside_messages_and_second_names_are_listed(tokenizer):
    calls = [
        {"id": "c", "type": "function", "sig": "x", "function": {"name": "f", "arguments": "{}"}}
    ]
    called = {
        "role": "assistant",
        "content": "a",
        "tool_calls": calls,
        "function_call": {"name": "g"},
    }
    row = {"prompt": {"messages": [{**ASKED[0], "value": "r"}, called], "topic": "t"}}
    unread: set[str] = set()
    messages = to_messages(row["prompt"], unread=unread)
    assert [message["content"] for message in messages] == ["q", "a"]
    assert unread == {
        *("'topic' beside 'messages'", "'value' of messages"),
        *("'function_call' of messages", "'sig' of tool calls"),
    }


def test_columns_and_keys_that_are_not_read_are_listed_in_one_line(tokenizer):
    parts = [{"type": "text", "text": "q", "cache_control": "x"}]
    answers = [{"role": "user", "content": parts}]
    row = {"prompt": answers, "completion": [{"role": "assistant", "content": [{"type": "text",
           "text": "a"}], "name": "Tom", "score": 1}], "source": "web"}  # fmt: skip
    text, notices = sft(tokenizer, row)
    assert text == "<|user|>q<|end|><|assistant|>a<|end|>"
    left = "'source', 'cache_control' of content parts, 'name' of messages, 'score' of messages"
    assert notices[1] == f"not read: {left}"
    text, notices = sft(tokenizer, {**ALPACA, "system": "Be terse.", "tools": "[]"})
    assert isinstance(notices[1], Caution) and notices[1] == "not read: 'system', 'tools'"


def test_of_prompts_only_columns_with_a_meaning_are_listed(tokenizer):
    row = {"messages": DIALOGUE, "instruction": "x", "level": 3}
    assert prompt(tokenizer, row)[1][1] == "not read: 'instruction', answers at the end of prompts"
    row = {"prompt": "q", "chat_template_kwargs": {"enable_thinking": False}}
    assert prompt(tokenizer, row)[1][1] == "not read: 'chat_template_kwargs'"
    assert len(prompt(tokenizer, row, has_agents=True)[1]) == 1  # the agents' server reads it


def test_named_templates_without_one_for_rows_are_refused_in_a_line_only_where_one_is_needed(
    tokenizer,
):
    tokenizer.chat_template = {"tool_use": CHAT_TEMPLATE}
    assert sft(tokenizer, {"prompt": "q", "completion": "a"})[0] == "qa<|end|>"
    told = "has no chat template named default, only tool_use. Give one with --tokenizer_chat_templ"
    with pytest.raises(ConfigError, match=told):
        sft(tokenizer, {"messages": DIALOGUE})
    text, _ = sft(tokenizer, {"messages": DIALOGUE, "tools": [{"name": "f"}]})
    assert text == "<|user|>q<|end|><|assistant|>a<|end|>"


THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}NO {% endif %}" + CHAT_TEMPLATE
)


def test_a_row_sets_variables_of_the_template(tokenizer):
    tokenizer.chat_template = THINKING
    row = {"messages": DIALOGUE, "chat_template_kwargs": {"enable_thinking": False}}
    assert sft(tokenizer, row)[0].startswith("NO <|user|>")
    assert prompt(tokenizer, row)[0].startswith("NO <|user|>")
    assert sft(tokenizer, {"messages": DIALOGUE})[0].startswith("<|user|>")
    told = json.dumps({"thinking": 1})
    assert "not read: 'thinking' of chat_template_kwargs" in sft(
        tokenizer, {"messages": DIALOGUE, "chat_template_kwargs": told}
    )[1]  # fmt: skip
    with pytest.raises(DataError, match="'chat_template_kwargs' sets tools, which the row"):
        sft(tokenizer, {"messages": DIALOGUE, "chat_template_kwargs": '{"tools": []}'})


def test_the_columns_of_a_prompt_hold_no_nulls_that_a_table_filled_in(tokenizer, tmp_path):
    told = [{"enable_thinking": False}, {"budget": 5, "enable_thinking": None}]
    history = json.dumps(DIALOGUE)
    rows = [{"messages": ASKED, "chat_template_kwargs": v, "history": history} for v in told]
    path, table = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "rows.parquet"
    Dataset.from_list(rows).to_parquet(table)
    for spec, second in ((path, told[1]), (table, {"budget": 5})):
        data = PromptDataset(load_rows(str(spec)), tokenizer, RowFormat())
        found = [record.columns["chat_template_kwargs"] for record in data]
        assert found == [told[0], second] and data[0].columns["history"] == history


def test_a_flag_sets_variables_of_the_template_for_all_rows_and_for_the_export(tmp_path: Path):
    made = make_tokenizer(tmp_path)
    made.chat_template = THINKING
    made.save_pretrained(tmp_path)
    path = str(tmp_path)
    tokenizer = load_tokenizer(path, template_variables='{"enable_thinking": false}')
    assert sft(tokenizer, {"messages": DIALOGUE})[0].startswith("NO <|user|>")
    row = {"messages": DIALOGUE, "chat_template_kwargs": {"enable_thinking": True}}
    assert sft(tokenizer, row)[0].startswith("<|user|>")
    tokenizer.save_pretrained(tmp_path)
    exported = load_tokenizer(path)
    assert exported.apply_chat_template(ASKED, tokenize=False).startswith("NO <|user|>")
    shown = exported.apply_chat_template(ASKED, tokenize=False, enable_thinking=True)
    assert shown.startswith("<|user|>")
    with pytest.raises(ConfigError, match="sets thinking, which the chat template of"):
        load_tokenizer(path, template_variables='{"thinking": 1}')
    for name in ("messages", "add_generation_prompt"):
        with pytest.raises(ConfigError, match=f"sets {name}, which rows do themselves"):
            load_tokenizer(path, template_variables=f'{{"{name}": []}}')
    with pytest.raises(ConfigError, match="no JSON object of variables"):
        load_tokenizer(path, template_variables="enable_thinking=false")


def test_a_name_with_dots_reaches_into_a_column(tokenizer):
    row = {"prompt": ASKED, "reward_model": {"style": "rule", "ground_truth": "4"}}
    label = {"label_key": "reward_model.ground_truth"}
    data = PromptDataset(Dataset.from_list([row]), tokenizer, RowFormat(**label))
    assert data[0].label == "4"
    assert data[0].columns == {"reward_model": row["reward_model"]}
    with pytest.raises(DataError, match=r"column 'reward_model\.truth' is not in the data set"):
        prompt(tokenizer, row, label_key="reward_model.truth")
    within = {"qa": {"q": "hi", "a": "yo", "good": 1}}
    text, notices = sft(tokenizer, within, input_key="qa.q", output_key="qa.a")
    assert (text, notices[0]) == ("hiyo<|end|>", "'qa.q' and 'qa.a' read as text")
    assert notices[1:] == ["not read: 'qa.good'"]
    form = RowFormat(input_key="qa.q", output_key="qa.a", label_key="qa.good")
    assert UnpairedPreferenceDataset(Dataset.from_list([within]), tokenizer, form)[0].is_desirable


def test_rows_of_a_data_set_with_other_columns_are_not_called_empty(tokenizer):
    rows = [{"prompt": "q", "completion": "a", "messages": None}, {"messages": DIALOGUE}]
    _, notices = sft(tokenizer, *rows, usual_output=None)
    assert notices[1:] == [
        "not read: 'messages'",
        "1 of 2 rows were left out: no 'prompt' and no 'completion'",
    ]


def test_a_line_break_of_two_characters_in_the_template_is_said(tokenizer):
    row = {"prompt": "q", "completion": "a"}
    for template, num_notices in (("{}\\n", 2), ("{}\n", 1)):
        _, notices = sft(tokenizer, row, usual_output=None, input_template=template)
        assert len(notices) == num_notices


def test_a_message_whose_words_stand_under_another_key_is_not_called_empty(tokenizer):
    rows = [{"messages": [{"role": "user", "parts": "q"}, DIALOGUE[-1]]}]
    with pytest.raises(
        DataError, match="row 1: a message of role user without content, but with parts"
    ):
        sft(tokenizer, *rows)


def test_a_weight_of_a_users_turn_is_said_where_it_asks_to_learn_it(tokenizer):
    for weight, num_notices in ((1, 2), (0, 1)):
        _, notices = sft(tokenizer, {"messages": [{**ASKED[0], "weight": weight}, DIALOGUE[-1]]})
        assert len(notices) == num_notices


def test_bad_rows_are_left_out_and_written_where_that_is_asked_for(tokenizer, tmp_path, capfd):
    rows = [{"messages": DIALOGUE}, {"messages": ASKED + DIALOGUE}]
    with pytest.raises(DataError, match=r"1 bad rows.*--bad_rows skip"):
        sft(tokenizer, *rows, usual_output=None)
    data = SFTDataset(Dataset.from_list(rows), tokenizer, RowFormat(bad_rows="skip"))
    assert len(data) == 1 and "1 of 2 rows were left out: bad" in data.notices
    path = tmp_path / "bad_rows.jsonl"
    write_bad_rows(path, data, None)
    [line] = map(json.loads, path.read_text().splitlines())
    assert line["place"] == "row 2" and line["row"] == rows[1]
    assert line["problem"] == "message 2 is the user's, after the user's"
    said = " ".join(capfd.readouterr().err.split())
    assert "note: bad rows that were left out: 1; they are in" in said
    write_bad_rows(path, SFTDataset(Dataset.from_list(rows[:1]), tokenizer, RowFormat()))
    assert not path.exists()


def test_damaged_records_are_counted_and_written_with_the_other_bad_rows(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    good, odd = ({"messages": rows} for rows in (DIALOGUE, ASKED + DIALOGUE))
    torn = '{"messages": [{"role": "us'
    path.write_text("\n".join([json.dumps(good), torn, json.dumps(odd), json.dumps(good)]))
    rows = load_rows(str(path), allowed=["damaged records"])
    data = SFTDataset(rows, tokenizer, RowFormat(bad_rows="skip"))
    assert len(data) == 2 and "2 of 4 rows were left out: bad" in data.notices
    write_bad_rows(tmp_path / "bad.jsonl", data)
    first, second = map(json.loads, (tmp_path / "bad.jsonl").read_text().splitlines())
    assert (first["place"], first["row"]) == (f"{path}:2", torn)
    assert first["problem"].startswith("not JSON: Invalid control character")
    assert (second["place"], second["row"]) == (f"{path}: row 3", odd)


def test_a_damaged_record_does_not_put_the_prompt_before_answers_that_hold_it(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    pair = {"prompt": "1+1=", "chosen": "1+1=2", "rejected": "1+1=3"}
    path.write_text(f'{json.dumps(pair)}\n{{"prompt\n')
    rows = load_rows(str(path), allowed=["damaged records"])
    [pair] = PreferenceDataset(rows, tokenizer, RowFormat(bad_rows="skip"))
    assert tokenizer.decode(pair.chosen_ids) == "1+1=2<|end|>"


def test_bad_rows_are_listed_by_kind(tokenizer):
    rows = [{"messages": ASKED * n + DIALOGUE} for n in range(1, 31)]
    rows.append({"messages": [{"role": "x"}]})
    with pytest.raises(DataError) as caught:
        sft(tokenizer, *rows)
    head, *lines = str(caught.value).splitlines()
    assert head.startswith("data set: 31 bad rows.")
    assert len(lines) == 12
    assert lines[9:] == [
        "row 10: message 2 is the user's, after the user's",
        "... and 20 more of this kind",
        "row 31: unknown role 'x'; roles are system, developer, user, assistant, tool",
    ]


def test_the_token_that_ends_turns_is_said_where_the_model_does_not_know_it(tokenizer):
    tokenizer.eos_token = "<|pad|>"
    told = "<|end|> ends turns in the chat template, and the model's own settings do not know it"
    assert any(line.startswith(told) for line in sft(tokenizer, {"messages": DIALOGUE})[1])


def test_evaluation_rows_that_are_the_training_rows_are_said(tokenizer):
    data, same, other = (
        SFTDataset(Dataset.from_list([{"messages": rows}]), tokenizer, RowFormat())
        for rows in (DIALOGUE, DIALOGUE, SHAREGPT)
    )
    told = "--eval_dataset has the rows of the training data: give it others, if you can"
    assert (repeats(same, data), repeats(other, data)) == ([told], [])
