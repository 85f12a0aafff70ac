"""Every field of a message is written by the chat template as it is meant, or its row is refused.

The published templates are read from an installed TRL.
"""

import importlib.util
from pathlib import Path

import pytest

from openrlhf.datasets.chat import LeftOutError, RowError, render_dialogue, to_messages
from openrlhf.errors import ConfigError
from openrlhf.utils.tokenizer import TextEncoder, Tokenizer
from tests.tiny import make_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def templates() -> dict[str, str]:
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        return {}
    folder = Path(found.origin).parent / "chat_templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


TEMPLATES = templates()
needs_templates = pytest.mark.skipif(not TEMPLATES, reason="needs the templates that TRL installs")


def user(content: object, **more: object) -> dict:
    return {"role": "user", "content": content, **more}


def answer(content: object, **more: object) -> dict:
    return {"role": "assistant", "content": content, **more}


def text(content: str) -> list[dict]:
    return [{"type": "text", "text": content}]


def call(arguments: object, content: object = None) -> dict:
    function = {"name": "weather", "arguments": arguments}
    return answer(content, tool_calls=[{"id": "call_a", "type": "function", "function": function}])


def result(content: object) -> dict:
    return {"role": "tool", "name": "weather", "tool_call_id": "call_a", "content": content}


ASKED, CALLED = user("Where?"), call({"city": "Bonn"})
# A dialogue, words that must be learnt, words that must be there, and of the 72 templates the least
# number that write it (the others refuse it).
CASES = {
    "text": ([ASKED, answer("There.")], ["There."], ["Where?"], 66),
    "parts": ([user(text("Where?")), answer(text("There."))], ["There."], ["Where?"], 66),
    "arguments": ([ASKED, call({"city": "Bonn"})], ["weather", "city", "Bonn"], [], 41),
    "JSON text": ([ASKED, call('{"city": "Bonn"}')], ["weather", "city", "Bonn"], [], 41),
    "words and a call": ([ASKED, call({"city": "Bonn"}, "Wait.")], ["Wait.", "Bonn"], [], 37),
    "a result": ([ASKED, CALLED, result("Rain!"), answer("Wet.")], ["Wet."], ["Rain!"], 42),
    "values": ([ASKED, CALLED, result({"sky": "Rain!"}), answer("Wet.")], ["Wet."], ["Rain!"], 42),
    "thoughts": ([ASKED, answer("There.", reasoning_content="Hmm.")], ["Hmm.", "There."], [], 29),
    "<think>": ([ASKED, answer("<think>\nHmm.\n</think>\n\nThere.")], ["Hmm.", "There."], [], 68),
    "objects": ([ASKED, call({"at": {"city": "Bonn"}})], ["weather", "city", "Bonn"], [], 41),
    "no thoughts": ([ASKED, answer("There.", reasoning_content="")], ["There."], [], 66),
    "the same thoughts": (
        [ASKED, answer("There.", reasoning="Hmm.", reasoning_content="Hmm.")],
        ["Hmm.", "There."],
        [],
        29,
    ),
    "a name": ([user("Where?", name="Tom"), answer("There.")], ["There."], ["Where?"], 66),
}
PYTHON_TEXT = ("'Bonn'}", "'text': '", "'sky':", '\\"city', '\\"Bonn')


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose end token is in no published template."""
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("plain"))
    tokenizer.eos_token, tokenizer.bos_token = "<|pad|>", "<|system|>"
    return tokenizer


@needs_templates
@pytest.mark.parametrize("name", CASES)
def test_published_templates_write_each_field_as_it_is_meant_or_refuse_the_row(plain, name):
    messages, learnt, others, at_least = CASES[name]
    written, dialogue = 0, to_messages(messages)
    for template_name, template in TEMPLATES.items():
        plain.chat_template = template
        encoder = TextEncoder(plain)
        try:
            rendered = render_dialogue(encoder, dialogue, first=len(dialogue) - 1)
        except (RowError, ConfigError):
            continue
        written += 1
        targets = "".join(piece for piece, is_learnt in rendered.pieces if is_learnt)
        missing = [word for word in learnt if word not in targets]
        missing += [word for word in others if word not in rendered.text]
        assert not missing, (template_name, rendered.text)
        assert not any(bad in rendered.text for bad in PYTHON_TEXT), (template_name, rendered.text)
        if name == "a name" and "Tom" not in rendered.text:
            assert encoder.unread == {"'name' of messages"}, template_name
    assert written >= at_least or len(TEMPLATES) != 72


def refusal(tokenizer: Tokenizer, template: str, messages: list[dict]) -> str:
    tokenizer.chat_template = template
    with pytest.raises(RowError) as caught:
        render_dialogue(TextEncoder(tokenizer), to_messages(messages))
    return str(caught.value)


def test_tool_calls_that_the_template_does_not_know_are_a_row_error(plain):
    lost = "message 2, the assistant's: its tool calls would be left out by the chat template"
    assert refusal(plain, CHATML, [ASKED, call('{"a": 1}')]) == lost


def test_words_that_the_template_leaves_out_are_a_row_error(plain):
    system = {"role": "system", "content": "Be terse."}
    dialogue = [system, ASKED, answer("There.")]
    for role, place in (("system", 1), ("user", 2), ("assistant", 3)):
        silent = CHATML.replace("m.content", f"m.content if m.role != '{role}'")
        lost = f"message {place}, the {role}'s: its text would be left out by the chat template"
        assert refusal(plain, silent, dialogue) == lost
    plain.chat_template = CHATML
    assert "Be terse." in render_dialogue(TextEncoder(plain), to_messages(dialogue)).text


def test_thoughts_that_the_template_cuts_off_are_a_row_error_where_they_are_learnt(plain):
    cutting = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    thinks = answer("<think>Hmm.</think>There.")
    found = refusal(plain, cutting, [ASKED, thinks])
    assert (
        found == "message 2, the assistant's: its thoughts would be left out by the chat template"
    )
    encoder = TextEncoder(plain)
    render_dialogue(encoder, to_messages([ASKED, thinks, user("So?"), answer("Yes.")]), first=3)
    assert encoder.unread == {"thoughts of earlier turns"}


def test_the_template_for_tools_is_taken_where_there_are_tools(plain):
    plain.chat_template = {"default": CHATML, "tool_use": f"{{{{ tools[0].name }}}}\n{CHATML}"}
    dialogue = to_messages([ASKED, answer("There.")])
    rendered = render_dialogue(TextEncoder(plain), dialogue, tools=[{"name": "weather"}])
    assert rendered.text.startswith("weather\n<|im_start|>")
    assert render_dialogue(TextEncoder(plain), dialogue).text.startswith("<|im_start|>")


def test_arguments_that_would_be_learnt_as_python_text_are_a_row_error(plain):
    each = "{% for k, v in m.tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    named = "{{ m.tool_calls[0].function.name }}"
    printed = CHATML.replace("{{ m.content }}", f"{{% if m.tool_calls %}}{named}{each}{{% else %}}"
                             "{{ m.content }}{% endif %}")  # fmt: skip
    plain.chat_template = printed
    dialogue = to_messages([ASKED, call({"city": "Bonn", "days": [1, 2]})])
    assert "city=Bonn" in render_dialogue(TextEncoder(plain), dialogue).text
    whole = CHATML.replace("m.content", "m.content ~ m.tool_calls")
    for template, found in (
        (whole, {"city": "Bonn"}),
        (printed, {"at": {"city": "Bonn"}}),
        (printed, {"all": [{"city": "Bonn"}]}),
    ):
        told = refusal(plain, template, [ASKED, call(found)])
        assert told.endswith("would be written by the chat template as the text of an object")


def test_what_the_template_does_not_write_of_tools_is_said(plain):
    properties = {"city": {"type": "string"}}
    weather = {"name": "f", "description": "d", "parameters": {"properties": properties}}
    for template, tool, unread in (
        (CHATML, {"type": "function", "function": {"name": "f"}}, {"tools"}),
        (
            f"{{{{ (tools or [{{}}])[0].name }}}}{CHATML}",
            weather,
            {"'description' of tools", "'parameters' of tools"},
        ),
    ):
        plain.chat_template, encoder = template, TextEncoder(plain)
        render_dialogue(encoder, to_messages([ASKED, answer("There.")]), tools=[tool])
        assert encoder.unread == unread


def test_a_call_is_learnt_in_each_form_that_data_sets_give_it(plain):
    plain.chat_template = CHATML.replace("m.content", "m.content ~ (m.tool_calls or '')|tojson")
    written = '{"name": "f", "arguments": {"a": 1}}'
    function = {"name": "f", "arguments": {"a": 1}}
    calls = [
        {"from": "function_call", "value": written},
        {"from": "tool_call", "value": written.replace("arguments", "parameters")},
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        answer(None, tool_calls=[{"type": "function", "function": function}]),
    ]
    texts = {render_dialogue(TextEncoder(plain), to_messages([ASKED, c])).text for c in calls}
    assert len(texts) == 1 and written in texts.pop()
    unnamed = {"from": "function_call", "value": "{}"}
    for bad in (unnamed, answer(None, tool_calls=[{"function": "weather"}])):
        with pytest.raises(RowError, match="a tool call is no object with a name and arguments"):
            to_messages([ASKED, bad])


@pytest.mark.parametrize("text", ['{"a": 1e400}', '{"a": NaN}', '{"a": 1, "a": 2}'])
def test_arguments_as_text_are_read_as_they_stand_or_refused(text):
    with pytest.raises(RowError, match=r"is not a number that can be trained on|duplicate key a"):
        to_messages([ASKED, call(text)])


def test_roles_mean_what_their_formats_mean():
    names = ["prompter", "function_call", "observation", "gpt"]
    values = ["a", '{"name": "f", "arguments": {}}', "1", "b"]
    turns = [{"from": n, "value": v} for n, v in zip(names, values, strict=True)]
    roles = [message["role"] for message in to_messages(turns)]
    assert roles == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("template", [CHATML, CHATML.replace("{{ m.content }}<|im_end|>\n",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
    "{{ m.content }}{% endif %}<|im_end|>\n")])  # fmt: skip
@pytest.mark.parametrize("weight", ["weight", "train", "loss_mask"])
def test_turns_that_are_empty_or_say_so_are_not_learnt(plain, template, weight):
    plain.chat_template, encoder = template, TextEncoder(plain)
    turns = [ASKED, answer("bad", **{weight: 0}), ASKED, answer(""), ASKED, answer("good")]
    rendered = render_dialogue(encoder, to_messages(turns))
    targets = "".join(piece for piece, is_learnt in rendered.pieces if is_learnt)
    assert "good" in targets and "bad" not in targets and targets.count("<|im_end|>") <= 1
    assert encoder.unread == {"empty turns of the assistant"}
    with pytest.raises(LeftOutError, match="no turn is to be learnt"):
        render_dialogue(encoder, to_messages(turns[:2]))
    with pytest.raises(RowError, match=r"'weight' of a message is 0\.5, not 0 or 1"):
        render_dialogue(encoder, to_messages([ASKED, answer("half", weight=0.5)]))


def test_a_template_that_opens_an_answer_otherwise_is_refused_without_naming_multiturn(plain):
    plain.chat_template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    with pytest.raises(ConfigError, match="a prompt otherwise than the beginning") as caught:
        render_dialogue(TextEncoder(plain), to_messages([ASKED, answer("There.")]))
    assert "--multiturn" not in str(caught.value)


def test_a_part_that_is_no_text_is_a_row_error(plain):
    plain.chat_template = CHATML
    picture = [*text("What?"), {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(RowError, match="content of type 'image_url' in the user's message; only"):
        to_messages([user(picture), answer("A cat.")])
    shot = [*text("Here:"), {"type": "image", "image": "x"}]
    with pytest.raises(RowError, match="content of type 'image' in the tool's message; only text"):
        to_messages([ASKED, CALLED, result(shot)])
    listed = [{"type": "file", "path": "a.txt"}]  # values of the tool's own
    assert to_messages([ASKED, CALLED, result(listed)])[2]["content"] == listed
