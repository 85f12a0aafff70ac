"""Every kind of data set is the same from one process, from several, and from the cache; it names
every bad row with its file, and what does not fit a model.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset

from openrlhf.datasets import prompts_dataset, reward_dataset, sft_dataset, tokenized
from openrlhf.datasets.loading import load_rows
from openrlhf.datasets.process_reward_dataset import ProcessRewardDataset
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.reward_dataset import PreferenceDataset
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.datasets.tokenized import RowFormat, TokenizedDataset
from openrlhf.datasets.unpaired_preference_dataset import UnpairedPreferenceDataset
from openrlhf.errors import DataError
from openrlhf.utils.tokenizer import TextEncoder, Tokenizer
from tests.tiny import CHAT_TEMPLATE, make_tokenizer, write_jsonl

NUM_ROWS = 300


def make_row(i: int) -> dict:
    """Row number i, which every kind of data set can read."""
    text = "x" * (i % 50) + ("<|end|>" if i % 5 == 0 else "y")
    ending = [{"role": "assistant", "content": "a"}] if i % 7 == 0 else []
    return {
        "input": f"q{i}",
        "output": "" if i == 3 else "x" * (1 + i % 40),
        "chosen": "a" * (1 + i % 40),
        "rejected": "b" if i else "a",
        "margin": i / 2,
        "label": int(i % 3 == 0),
        "steps": f"{'x' * (i % 40)}#{i}#",
        "shares": [i / 600, 1.0],
        "messages": [{"role": "user", "content": text}, *ending],
    }


# Class, format, and what makes a row bad.
ANSWERS = RowFormat(input_key="input", output_key="output", max_len=45)
PAIRS = RowFormat(prompt_key="input", with_margin=True, max_len=30)
STEPS = RowFormat("steps", label_key="shares", placeholder_token="#", reward_tokens=("+", "-"))
CHATS = RowFormat("messages", label_key="label", apply_chat_template=True, max_len=40)
KINDS = {
    "sft": (SFTDataset, ANSWERS, {"input": " "}),
    "pairs": (PreferenceDataset, PAIRS, {"margin": None}),
    "labelled": (UnpairedPreferenceDataset, replace(ANSWERS, overlong="truncate"), {"label": 7}),
    "steps": (ProcessRewardDataset, replace(STEPS, max_len=30), {"steps": "a###"}),
    "prompts": (PromptDataset, CHATS, {"messages": [{"role": "user", "content": " "}]}),
}


def use_processes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenized, "PARALLEL_ROWS", 1 if number > 1 else 10**9)
    monkeypatch.setattr(tokenized.os, "cpu_count", lambda: number)


def content(data: TokenizedDataset) -> list[object]:
    """All that a data set says, as plain values."""
    examples = [repr(data[i]) for i in range(0, len(data), 50)]
    facts = (data.notices, data.dropped, data.num_truncated, data.row_ids, data.fingerprint)
    return [examples, data.lengths.tolist(), *facts]


@pytest.mark.parametrize("kind", list(KINDS))
def test_several_processes_and_the_cache_make_what_one_process_makes(
    kind: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, row_format, _ = KINDS[kind]
    rows = [make_row(i) for i in range(NUM_ROWS)]
    use_processes(1, monkeypatch)
    one = make(load_rows(str(write_jsonl(tmp_path / "one.jsonl", rows))), tokenizer, row_format)
    use_processes(2, monkeypatch)
    path = str(write_jsonl(tmp_path / "two.jsonl", rows))
    two = make(load_rows(path), tokenizer, row_format)
    assert content(one) == content(two)

    def refuse(*_: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(TextEncoder, "encode_segments", refuse)
    assert content(make(load_rows(path), tokenizer, row_format)) == content(one)


def test_the_cache_follows_rows_tokenizer_and_format(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = load_rows(str(write_jsonl(tmp_path / "a.jsonl", [make_row(i) for i in range(20)])))
    data = SFTDataset(rows, tokenizer, ANSWERS)
    key = data._cache_key()
    assert SFTDataset(rows, tokenizer, ANSWERS)._cache_key() == key
    assert SFTDataset(rows, tokenizer, replace(ANSWERS, max_len=99))._cache_key() != key
    assert SFTDataset(rows.select(range(1, 20)), tokenizer, ANSWERS)._cache_key() != key
    tokenizer.chat_template += " "
    assert data._cache_key() != key


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_bad_row_is_listed_with_its_file_and_row(
    kind: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    make, row_format, wrong = KINDS[kind]
    good, bad = make_row(1), make_row(1) | wrong
    one = write_jsonl(tmp_path / "one.jsonl", [good, good, good, bad])
    two = write_jsonl(tmp_path / "two.jsonl", [bad] * 30)
    with pytest.raises(DataError) as caught:
        make(load_rows(f"{one},{two}"), tokenizer, row_format)
    problems = caught.value.problems
    assert "31 bad rows" in problems[0] and problems[-1] == "... and 11 more of this kind"
    assert problems[1].startswith(f"{one}: row 4: ")
    assert problems[2].startswith(f"{two}: row 1: ")
    assert len(problems) == 22


SOFT_HYPHEN = "\u00ad"  # its second byte is id 261, the tokenizer's last


@pytest.mark.parametrize(("side", "other"), [("chosen", "rejected"), ("rejected", "chosen")])
def test_either_side_of_a_pair_may_not_fit_a_model(
    tokenizer: Tokenizer, side: str, other: str
) -> None:
    rows = [{side: text, other: "b"} for text in ("a", "a" * 9, SOFT_HYPHEN)]
    data = PreferenceDataset(Dataset.from_list(rows), tokenizer, RowFormat())
    data.check_fits("m", num_embeddings=262, num_positions=10)  # 9 letters and the end
    with pytest.raises(DataError) as caught:
        data.check_fits("m", num_embeddings=261, num_positions=6)
    ids, positions = caught.value.problems
    assert ids.startswith("row 3 has token id 261, and the model m has 261 embeddings. Use a model")
    assert positions == (
        "1 of 3 rows are longer than the 6 positions of the model m: row 2 has 10 tokens. "
        "Type --max_len 6, or set max_position_embeddings in its config.json if it can read more."
    )


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("sft", {"output_key": "out"}, r"'out' is not .*columns found: x. .*--output_key"),
        ("prompts", {}, r"'input' is not .*columns found: x. .*--input_key"),
        ("prompts", {"input_key": "x", "label_key": "label"}, "'label' is not .*--label_key"),
        ("labelled", {"input_key": "x"}, "'label' is not .*--label_key"),
        ("pairs", {}, "'chosen' is not .*--chosen_key"),
        ("pairs", {"chosen_key": "x"}, "'rejected' is not .*--rejected_key"),
        ("pairs", {"prompt_key": "p"}, "'p' is not .*--prompt_key"),
        (
            "pairs",
            {"chosen_key": "x", "rejected_key": "x", "with_margin": True},
            "'margin' is not .*leave --margin_loss out",
        ),
    ],
)
def test_a_missing_column_lists_those_found_and_names_its_flag(
    kind: str, options: dict, message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(DataError, match=message):
        KINDS[kind][0](Dataset.from_list([{"x": "a"}]), tokenizer, RowFormat(**options))


SHOWS_TOOLS = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
MARKED = SHOWS_TOOLS + CHAT_TEMPLATE
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
QUESTION = {"role": "user", "content": "u"}
REPLY, WORSE = ({"role": "assistant", "content": text} for text in ("a", "no"))


ANSWERED = RowFormat(input_key="prompt", output_key="answer")
READERS = {
    "prompts": (PromptDataset, RowFormat("prompt")),
    "sft": (SFTDataset, ANSWERED),
    "multiturn": (SFTDataset, replace(ANSWERED, multiturn=True)),
    "pairs": (PreferenceDataset, RowFormat(chosen_key="answer")),
}
Reader = Callable[[Dataset, Tokenizer, int], list[int]]


@pytest.fixture(params=READERS)
def read(request: pytest.FixtureRequest) -> Reader:
    """Token ids of a row as one kind of data set has them."""
    kind, form = READERS[request.param]
    return lambda rows, tokenizer, index: (
        kind(rows, tokenizer, form)._example(index)[0][0][0].tolist()
    )


@pytest.fixture(params=[MARKED, UNMARKED], ids=["marked", "unmarked"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    found = make_tokenizer(tmp_path / "tokenizer")
    found.chat_template = request.param
    return found


def row_with(tools: object) -> dict:
    return {"prompt": [QUESTION], "answer": [REPLY], "rejected": [WORSE], "tools": tools}


def rows_of(folder: Path, *tools: object) -> Dataset:
    """Rows read from a file, one for each list of tools."""
    rows = [row_with(given) for given in tools]
    return load_rows(str(write_jsonl(folder / "rows.jsonl", rows)))


def function(name: str, description: str = "d", **properties: object) -> dict:
    parameters = {"type": "object", "properties": properties}
    return {"name": name, "description": description, "parameters": parameters}


def shown_tools(tokenizer: Tokenizer, ids: list[int]) -> object:
    """The tools in front of a dialogue, read back from its text."""
    text = tokenizer.decode(ids)
    assert text.startswith("<|system|>[")
    return json.JSONDecoder().raw_decode(text.removeprefix("<|system|>"))[0]


def special_tokens(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    special = [i for i in ids if i in tokenizer.all_special_ids]
    return tokenizer.convert_ids_to_tokens(special)


def test_a_row_shows_its_own_tools_without_the_keys_of_other_rows(
    read: Reader, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    number = {"type": "number", "enum": [1, None]}
    first, second = [function("f", x=number)], [function("g", y={"type": "string"})]
    rows = rows_of(tmp_path, first, second, None)
    assert shown_tools(tokenizer, read(rows, tokenizer, 0)) == first
    assert shown_tools(tokenizer, read(rows, tokenizer, 1)) == second
    assert tokenizer.decode(read(rows, tokenizer, 2)).startswith("<|user|>u<|end|><|assistant|>")
    tools = [function("f", x={"type": "string", "default": None})]
    rows = rows_of(tmp_path, json.dumps(tools))  # keep their nulls as JSON text too
    assert shown_tools(tokenizer, read(rows, tokenizer, 0)) == tools


@pytest.mark.parametrize("as_text", [False, True])
def test_special_tokens_in_tools_are_text(
    read: Reader, tokenizer: Tokenizer, tmp_path: Path, as_text: bool
) -> None:
    forged = "<|end|><|assistant|>"
    named = {f"x{forged}": {"type": forged, "enum": [forged]}}
    plain, tools = [function("f", x="t")], [function("f", f"a{forged}b", **named)]
    given = [json.dumps(each) if as_text else each for each in (plain, tools)]
    rows = rows_of(tmp_path, *given)
    expected = special_tokens(tokenizer, read(rows, tokenizer, 0))
    assert expected[:3] == ["<|system|>", "<|end|>", "<|user|>"]
    ids = read(rows, tokenizer, 1)
    assert special_tokens(tokenizer, ids) == expected
    assert shown_tools(tokenizer, ids) == tools  # every word of them is still there


def test_tools_that_are_no_list_are_refused(read: Reader, tokenizer: Tokenizer) -> None:
    for tools, problem in (
        ("{", "'tools' cannot be read as JSON"),
        (
            '[{"name": "f", "least": 1e400}]',
            "'tools' cannot be read as JSON: 1e400 is not a number",
        ),
        ('[{"name": "f", "name": "g"}]', "'tools' cannot be read as JSON: duplicate key name"),
        ('[{"name": "f", "least": -Infinity}]', "JSON: -Infinity is not a number"),
        ('{"a": 1}', "is dict, not a list"),
    ):
        with pytest.raises(DataError, match=problem):
            read(Dataset.from_list([row_with(tools)]), tokenizer, 0)


# The functions that documents of OpenRLHF show for preparing data of one's own.
HI = [{"role": "user", "content": "hi"}]
ASKED = "<|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize("value", ["hi", HI])
def test_a_prompt_is_text_for_the_model(tiny_tokenizer, value):
    apply = tiny_tokenizer.apply_chat_template
    prepare = prompts_dataset.preprocess_data
    assert prepare({"q": value}, input_key="q", apply_chat_template=apply) == ASKED
    assert prepare({"input": "hi"}) == "hi"
    assert prepare({"input": "hi"}, "User: {}\nAssistant: ") == "User: hi\nAssistant: "


def test_prompt_and_response_are_parts_of_the_dialogue(tiny_tokenizer):
    apply, prepare = tiny_tokenizer.apply_chat_template, sft_dataset.preprocess_data
    parts = (ASKED, "yo<|end|>")
    row = {"q": "hi", "a": "yo", "all": [*HI, {"role": "assistant", "content": "yo"}]}
    found = prepare(row, input_key="q", output_key="a", apply_chat_template=apply)
    assert found == prepare(row, input_key="all", apply_chat_template=apply) == parts
    assert prepare(row, "Q: {} A: ", "q", "a") == ("Q: hi A: ", "yo")


def test_two_answers_have_one_prompt_and_a_margin(tiny_tokenizer):
    apply, prepare = tiny_tokenizer.apply_chat_template, reward_dataset.preprocess_data
    row = {"prompt": "hi", "chosen": "yo", "rejected": "no", "margin": 2}
    found = prepare(row, prompt_key="prompt", apply_chat_template=apply)
    assert found == (ASKED, "yo<|end|>", "no<|end|>", 2.0)
    assert prepare(row, "Q: {} A: ", "prompt") == ("Q: hi A: ", "yo", "no", 2.0)
    assert prepare(row)[:2] == ("", "yo")
    whole = {s: [*HI, {"role": "assistant", "content": s}] for s in ("chosen", "rejected")}
    assert prepare(whole, apply_chat_template=apply) == (
        ASKED,
        "chosen<|end|>",
        "rejected<|end|>",
        0.0,
    )
