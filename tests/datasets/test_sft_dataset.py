"""What is learned: the response and its end, every assistant turn, or every token."""

import json
import re

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.datasets.tokenized import DEFAULT_TEMPLATE, RowFormat
from openrlhf.datasets.unpaired_preference_dataset import UnpairedPreferenceDataset
from openrlhf.errors import ConfigError, DataError
from openrlhf.utils.tokenizer import load_tokenizer
from tests.helpers.rows import PLAIN_TEMPLATE, message
from tests.helpers.tokenizers import BOS, EOS, bos_tokenizer
from tests.tiny import CHAT_TEMPLATE


def examples(tokenizer, rows: list[dict], **options) -> SFTDataset:
    form = RowFormat(**{"input_template": DEFAULT_TEMPLATE, **options})
    return SFTDataset(Dataset.from_list(rows), tokenizer, form)


def shown(tokenizer, dataset: SFTDataset, index: int = 0) -> tuple[str, str]:
    """The whole text of an example and the text of its targets."""
    ids, mask = dataset[index].token_ids, dataset[index].loss_mask
    return tokenizer.decode(ids), tokenizer.decode(ids[mask])


@pytest.mark.parametrize("output", ["yo", "yo<|end|>", "yo<|end|>\n"])
def test_the_response_is_learnt_with_one_eos_also_where_it_spells_its_own(tokenizer, output):
    rows = [{"input": "hi", "output": output}]
    dataset = examples(tokenizer, rows, output_key="output")
    assert shown(tokenizer, dataset) == ("User: hi\nAssistant: yo<|end|>", "yo<|end|>")
    assert dataset[0].token_ids.tolist().count(1) == 1
    dataset = examples(tokenizer, rows, output_key="output", apply_chat_template=True)
    assert shown(tokenizer, dataset)[1] == "yo<|end|>"
    assert dataset[0].token_ids.tolist().count(1) == 2  # one ends the question


def test_plain_rows_begin_with_one_bos_and_end_with_one_eos():
    dataset = examples(bos_tokenizer(adds_bos=True), [{"q": "a", "r": "b"}], input_key="q",
                       output_key="r", input_template="{}")  # fmt: skip
    ids = dataset[0].token_ids.tolist()
    assert (ids[0], ids[-1], len(ids)) == (BOS, EOS, 4)
    assert dataset[0].loss_mask.tolist() == [False, False, True, True]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE])
def test_multiturn_learns_every_assistant_turn(tokenizer, template):
    tokenizer.chat_template = template
    turns = [("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")]
    rows = [{"conversations": [{"from": role, "value": text} for role, text in turns]}]
    dataset = examples(tokenizer, rows, apply_chat_template=True, multiturn=True)
    whole = "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>d<|end|>"
    assert shown(tokenizer, dataset) == (whole, "b<|end|>d<|end|>")
    assert dataset[0].token_ids.tolist() == tokenizer(whole).input_ids
    unasked = examples(tokenizer, rows, multiturn=True)
    assert shown(tokenizer, unasked) == (whole, "b<|end|>d<|end|>")
    assert unasked.notices == ["'conversations' read as messages, with the chat template"]


BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
BARE += "{% if add_generation_prompt %}assistant: {% endif %}"
# Marks the text of turns, and not their calls.
PARTLY = "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}CALL "
PARTLY += "{{ m.tool_calls | tojson }}<|end|>{% elif m.role == 'assistant' %}{% generation %}"
PARTLY += "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
PARTLY += "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
CUT = "{{ message['content'].split('</thought>')[-1] }}"
THOUGHT = PLAIN_TEMPLATE.replace("{{ message['content'] }}", CUT)


def called(**more: object) -> dict:
    function = {"name": "find", "arguments": {"a": 1}}
    return {**message("assistant", ""), "tool_calls": [{"function": function}], **more}


def test_a_template_that_marks_some_turns_only_does_not_shift_them(tokenizer):
    tokenizer.chat_template = PARTLY
    turns = [message("user", "q"), called(), message("user", "r")]
    bad = {**message("assistant", "BAD"), "weight": 0}
    rows = [{"messages": [*turns, bad, message("user", "s"), called(), message("user", "t"),
                          message("assistant", "GOOD")]}]  # fmt: skip
    dataset = examples(tokenizer, rows, multiturn=True)
    _, learnt = shown(tokenizer, dataset)
    assert "BAD" not in learnt and learnt.count("find") == 2 and learnt.endswith("GOOD<|end|>")
    rows = [{"messages": [message("user", "q"), message("assistant", "ONE"), turns[2], called()]}]
    _, learnt = shown(tokenizer, examples(tokenizer, rows))
    assert "ONE" not in learnt and "find" in learnt


def test_thoughts_that_a_template_would_cut_at_a_tag_of_its_own_refuse_their_row(tokenizer):
    tokenizer.chat_template = THOUGHT
    thought = "<thought>long</thought>4"
    rows = [{"messages": [message("user", "q"), message("assistant", thought)]}]
    with pytest.raises(DataError, match="its thoughts would be left out by the chat template"):
        examples(tokenizer, rows)


def test_earlier_answers_that_are_not_learnt_are_said(tokenizer):
    turns = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    rows = [{"messages": [*turns, message("assistant", "d")]}]
    told = "not read: earlier answers as targets (--multiturn learns them)"
    assert told in examples(tokenizer, rows).notices
    assert told not in examples(tokenizer, rows, multiturn=True).notices


LAST = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'user' %}{{ m.content }}{% else %}"
LAST += "{% generation %}{{ m.content }}{% if loop.last %}{{ eos_token }}{% endif %}"
LAST += "{% endgeneration %}{% endif %}{% endfor %}"
LAST += "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize(
    ("template", "is_said"),
    [(CHAT_TEMPLATE, False), (PLAIN_TEMPLATE, False), (BARE, True), (LAST, True)],
)
def test_a_template_that_does_not_end_earlier_turns_is_said(tokenizer, template, is_said):
    tokenizer.chat_template = template
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    rows = [{"messages": [message(*turn) for turn in turns]}]
    told = "--multiturn: the chat template writes no end token behind earlier turns"
    for multiturn in (True, False):
        notices = examples(tokenizer, rows, multiturn=multiturn).notices
        assert any(line.startswith(told) for line in notices) == (is_said and multiturn)


@pytest.mark.parametrize("multiturn", [False, True])
def test_all_answers_of_a_completion_are_learnt_and_none_of_its_prompt(tokenizer, multiturn):
    prompt = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    completion = [message("assistant", "d"), message("user", "e"), message("assistant", "f")]
    row = {"prompt": prompt, "completion": completion, "label": 1}
    options = {"multiturn": multiturn}
    assert shown(tokenizer, examples(tokenizer, [row], **options))[1] == "d<|end|>f<|end|>"
    rows = Dataset.from_list([row])
    labelled = UnpairedPreferenceDataset(rows, tokenizer, RowFormat(**options))
    assert shown(tokenizer, labelled)[1] == "d<|end|>f<|end|>"


def test_the_last_answer_of_a_completion_is_learnt_where_a_template_rewrites_others(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if loop.last and m.role == 'assistant' %}#{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [message("assistant", "d"), message("user", "e"), message("assistant", "f")]
    data = examples(tokenizer, [{"prompt": [message("user", "a")], "completion": turns}])
    assert shown(tokenizer, data)[1] == "#f<|end|>"
    told = "of a completion of several messages only the last one is learnt"
    assert any(line.startswith(told) for line in data.notices)


def test_a_template_without_an_end_marker_gets_the_eos(tokenizer):
    tokenizer.chat_template = BARE
    rows = [{"input": "hi", "output": "yo"}]
    dataset = examples(tokenizer, rows, output_key="output", apply_chat_template=True)
    assert shown(tokenizer, dataset) == ("user: hi\nassistant: yo\n<|end|>", "yo\n<|end|>")


OTHER_END = PLAIN_TEMPLATE.replace("<|end|>", "<|tool|>")  # not the EOS


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE, OTHER_END])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_prompt_that_is_rendered_already_is_not_rendered_again(tokenizer, template, reason):
    tokenizer.chat_template = template
    raw = {"input": "hi", "output": "yo", "finish_reason": reason}
    question = [message("user", "hi")]
    rendered = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    row = {**raw, "input": rendered}
    [expected] = examples(tokenizer, [raw], output_key="output", apply_chat_template=True)
    for rows, options in [
        ([row], {"apply_chat_template": True}),  # it looks so
        ([{**row, "is_rendered": True}], {"apply_chat_template": True}),  # it says so
        ([{**row, "is_rendered": True}], {}),
    ]:
        dataset = examples(tokenizer, rows, output_key="output", **options)
        assert dataset[0].token_ids.tolist() == expected.token_ids.tolist()
        assert dataset[0].loss_mask.tolist() == expected.loss_mask.tolist()


def test_a_template_that_rewrites_earlier_turns_is_refused_for_multiturn(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content }}{% if not loop.last and m.role == 'assistant' %}~{% endif %}"
        "<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rows = [{"input": [message("user", "a"), message("assistant", "long"),
                       message("user", "c"), message("assistant", "d")]}]  # fmt: skip
    with pytest.raises(ConfigError, match=r"rewrites earlier turns.*generation"):
        examples(tokenizer, rows, apply_chat_template=True, multiturn=True)
    assert shown(tokenizer, examples(tokenizer, rows, apply_chat_template=True))[1] == "d<|end|>"


def test_pretrain_mode_learns_every_token_but_the_first(tokenizer):
    dataset = examples(tokenizer, [{"input": "abc"}], pretrain_mode=True)
    assert shown(tokenizer, dataset) == ("abc<|end|>", "bc<|end|>")
    with_bos = examples(bos_tokenizer(adds_bos=True), [{"text": "abc"}], pretrain_mode=True)
    assert with_bos[0].token_ids.tolist()[0] == BOS
    assert with_bos[0].loss_mask.tolist() == [False, True, True, True, True]


def test_rows_without_a_target_are_dropped_and_counted(tokenizer):
    rows = [{"input": "a", "output": text} for text in ("x", "", None, "  ", "y")]
    for is_chat in (False, True):
        dataset = examples(tokenizer, rows, output_key="output", apply_chat_template=is_chat)
        assert (len(dataset), dataset.dropped.total(), dataset.row_ids) == (2, 3, [0, 4])
        assert dataset.notices[1:] == ["3 of 5 rows were left out: empty response"]
        assert len(dataset.template_notices) == (not is_chat)  # it would do with the flag


def test_over_long_rows_follow_the_policy(tokenizer):
    rows = [{"input": "ab", "output": "c" * n} for n in (1, 2, 3)]  # 4, 5 and 6 tokens with EOS
    options = {"output_key": "output", "input_template": None, "max_len": 5}
    kept = examples(tokenizer, rows, **options)
    assert (kept.lengths.tolist(), dict(kept.dropped)) == ([4, 5], {"over-long": 1})
    cut = examples(tokenizer, rows, overlong="truncate", **options)
    assert (cut.lengths.tolist(), cut.num_truncated) == ([4, 5, 5], 1)
    assert shown(tokenizer, cut, 2) == ("abccc", "ccc")
    with pytest.raises(DataError, match=r"row 3: 6 tokens, over the limit of 5"):
        examples(tokenizer, rows, overlong="error", **options)


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("input_key", [None, "input"])
def test_rows_of_input_and_output_say_what_to_type(tokenizer, input_key, is_chat):
    rows = [{"input": "a", "output": "b"}]
    said = "columns found: input, output. Type --input_key input --output_key output"
    with pytest.raises(DataError, match=said):
        examples(tokenizer, rows, input_key=input_key, apply_chat_template=is_chat)
    keys = {"input_key": "input", "output_key": "output"}
    assert shown(tokenizer, examples(tokenizer, rows, **keys))[1] == "b<|end|>"


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ("user assistant user", "the last message is"),
        ("user user assistant", "message 2 is the user's, after the user's"),
        ("user system assistant", "message 2 is the system's, after the user's"),
        ("user:blank assistant", "message 1, the user's, is empty"),
    ],
)
def test_dialogues_of_the_wrong_shape_are_named(tokenizer, roles, said):
    value = [
        message(role.removesuffix(":blank"), " " if ":" in role else "a") for role in roles.split()
    ]
    with pytest.raises(DataError, match=f"row 1: .*{said}"):
        examples(tokenizer, [{"input": value}], apply_chat_template=True)


def test_a_text_column_is_learnt_as_a_whole_where_nothing_says_otherwise(tokenizer):
    rows = [{"text": "abc", "id": 7}]
    dataset = examples(tokenizer, rows, pretrain_mode=None, input_template="Q: {}")
    assert shown(tokenizer, dataset) == ("abc<|end|>", "bc<|end|>")
    assert dataset.notices == [
        "'text' read as text, of which every token is learnt",
        "--input_template 'Q: {}' is not used for text, of which every token is learnt",
    ]
    with pytest.raises(DataError, match="no response column is given; columns found: text, id"):
        examples(tokenizer, rows, pretrain_mode=False)


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        # Of several conventions the one with an answer of its own; the flag before all of them.
        ({"input": "q", "output": "o", "is_rendered": True, "messages": "M"}, {}, "o<|end|>"),
        ({"input": "a", "output": "d"}, {"usual_output": "output"}, "d<|end|>"),
        ({"messages": "M"}, {"usual_output": "output"}, "m<|end|>"),
        ({"prompt": "p", "messages": "M", "text": "t"}, {}, "m<|end|>"),
        ({"prompt": "p", "completion": "c", "messages": "M"}, {}, "c<|end|>"),
        ({"instruction": "i", "input": "x", "output": "o"}, {}, "o<|end|>"),
        ({"instruction": "i", "input": "x", "output": "o", "text": "tt"}, {}, "t<|end|>"),
        ({"instruction": "i", "output": "o", "messages": "M"}, {}, "m<|end|>"),
        ({"messages": "M", "text": "tt"}, {"input_key": "text"}, "t<|end|>"),
        ({"messages": "M", "answer": "a"}, {"output_key": "answer"}, "<no prompt>"),
        ({"prompt": "p", "completion": "c", "answer": "a"}, {"output_key": "answer"}, "a<|end|>"),
        ({"text": "t", "answer": "a"}, {"output_key": "answer"}, "a<|end|>"),
        ({"prompt": "p", "text": "tt"}, {"pretrain_mode": True}, "t<|end|>"),
        ({"messages": "M"}, {"apply_chat_template": False}, "<refused>"),
        ({"input": "x", "answer": "a"}, {}, "<no answer>"),
    ],
)
def test_which_columns_are_read(tokenizer, columns, options, expected):
    dialogue = [message("user", "u"), message("assistant", "m")]
    row = {name: dialogue if value == "M" else value for name, value in columns.items()}
    options = {"pretrain_mode": None, **options}
    errors = {
        "<no prompt>": "the assistant's, after the assistant's",
        "<refused>": "'messages' is a message list. Add --apply_chat_template",
        "<no answer>": "no response column is given; columns found: input, answer",
    }
    if expected in errors:
        with pytest.raises(DataError, match=errors[expected]):
            examples(tokenizer, [row], **options)
    else:
        assert shown(tokenizer, examples(tokenizer, [row], **options))[1] == expected


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE])
@pytest.mark.parametrize("multiturn", [False, True])
def test_a_cut_answer_teaches_no_end_under_a_template_either(tokenizer, template, multiturn):
    tokenizer.chat_template = template
    turns = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    rows = [
        {"prompt": turns, "completion": "d<|end|> d d", "finish_reason": reason}
        for reason in ("length", "stop")
    ]
    dataset = examples(tokenizer, rows, multiturn=multiturn)
    learnt = "b<|end|>" if multiturn else ""
    (cut, cut_targets), (whole, targets) = (shown(tokenizer, dataset, k) for k in (0, 1))
    assert cut_targets == f"{learnt}d<|end|> d d"
    assert targets == f"{learnt}d<|end|> d d<|end|>"
    assert whole == cut + "<|end|>"


def test_what_a_template_writes_behind_a_cut_answer_is_left_out(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}[over]\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    row = {"prompt": "q", "completion": "an answ ", "finish_reason": "length"}
    dataset = examples(tokenizer, [row], apply_chat_template=True)
    assert shown(tokenizer, dataset) == ("user: q[over]\nassistant: an answ", "an answ")


def test_multiturn_without_a_chat_template_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"Add --apply_chat_template"):
        examples(tokenizer, [{"input": "a", "output": "b"}], output_key="output", multiturn=True)


# Templates in the style of five families: what opens a dialogue, a user's turn and an assistant's,
# the end of a turn with what stands behind it, what closes a dialogue, and where inference stops.
STYLES = {
    "qwen2.5": {
        "opening": "<|im_start|>system\nBe kind.<|im_end|>\n",
        "user": "<|im_start|>user\n",
        "assistant": "<|im_start|>assistant\n",
        "end": "<|im_end|>\n",
        "stops": ["<|im_end|>", "<|endoftext|>"],
    },
    "qwen3": {
        "user": "<|im_start|>user\n",
        "assistant": "<|im_start|>assistant\n",
        "before": "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}",
        "end": "<|im_end|>\n",
        "stops": ["<|im_end|>", "<|endoftext|>"],
    },
    "gemma": {
        "opening": "<bos>",
        "user": "<start_of_turn>user\n",
        "assistant": "<start_of_turn>model\n",
        "end": "<end_of_turn>\n",
        "stops": ["<eos>", "<end_of_turn>"],
    },
    "llama-3": {
        "opening": "<|begin_of_text|>",
        "user": "<|start_header_id|>user<|end_header_id|>\n\n",
        "assistant": "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "end": "<|eot_id|>",
        "stops": ["<|eot_id|>", "<|end_of_text|>"],
    },
    "phi-3": {
        "user": "<|user|>\n",
        "assistant": "<|assistant|>\n",
        "end": "<|end|>\n",
        "closing": "<|endoftext|>",
        "stops": ["<|endoftext|>", "<|end|>"],
    },
}
# Marked behind the last turn, too.
STYLES["phi-3, closing"] = {
    **STYLES["phi-3"],
    "closing": "{% if messages[-1].role == 'assistant' %}{% generation %}<|endoftext|>"
    "{% endgeneration %}{% endif %}",
}
BEHIND_THE_END = "{before}{{{{ m.content }}}}{end}@"
BEFORE_THE_END = "{before}{{{{ m.content }}}}@{end}"


def styled_tokenizer(folder, style: dict, marked: str):
    """A saved tokenizer with the style's special tokens, its end-of-turn ids in the generation
    config, and generation markers around what stands before `@`.
    """
    parts = {"opening": "", "before": "", "closing": "", **style}
    learnt, _, unlearnt = marked.format(**parts).partition("@")
    special = re.findall(r"<[|\w]+>", "".join([*map(str, parts.values())]).replace("<think>", ""))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*special, *alphabet]))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=parts["stops"][0],
        additional_special_tokens=list(dict.fromkeys(special)),
        chat_template=(
            f"{parts['opening']}{{% for m in messages %}}{{% if m.role == 'user' %}}"
            f"{parts['user']}{{{{ m.content }}}}{parts['end']}{{% else %}}{parts['assistant']}"
            f"{{% generation %}}{learnt}{{% endgeneration %}}{unlearnt}"
            f"{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{parts['assistant']}"
            f"{{% else %}}{parts['closing']}{{% endif %}}"
        ),
    ).save_pretrained(folder)
    ids = [vocab[stop] for stop in parts["stops"]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("marked", [BEHIND_THE_END, BEFORE_THE_END])
@pytest.mark.parametrize("name", STYLES)
def test_a_marked_turn_ends_once_where_inference_stops(tmp_path, name, marked):
    tokenizer = styled_tokenizer(tmp_path, STYLES[name], marked)
    end = STYLES[name]["end"].strip()
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    rows = [{"messages": [message(*turn) for turn in turns]}]
    last = "<think>\n\n</think>\n\nd" if name == "qwen3" else "d"
    every = examples(tokenizer, rows, multiturn=True)
    whole, learnt = shown(tokenizer, every)
    assert learnt == f"b{end}{last}{end}"
    assert whole.endswith(f"{last}{end}") and whole.count(end) == (5 if name == "qwen2.5" else 4)
    assert shown(tokenizer, examples(tokenizer, rows))[1] == f"{last}{end}"
