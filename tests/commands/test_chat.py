"""interactive_chat: history, streaming, commands, Ctrl-C, long talks, and a pseudo terminal."""

import io
import shutil
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
import transformers

from openrlhf.commands.chat import AnswerStream, Chat, say
from openrlhf.config.cli import parse_config
from openrlhf.config.serving import ChatConfig
from openrlhf.engines.base import GenerationRequest, SamplingSettings
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.errors import ConfigError
from openrlhf.utils.images import read_picture
from tests.helpers import tiny_vision

GREEDY = "--temperature 0 --repetition_penalty 1 --max_len 48"


@pytest.fixture
def talk(tiny_model_dir, monkeypatch, capsys):
    """Type lines into a chat, a new one or one that is given; return it and everything it wrote."""

    def talk(lines: str | io.StringIO, *flags: str, chat: Chat | None = None) -> tuple[Chat, str]:
        words = ["--pretrain", str(tiny_model_dir), *GREEDY.split(), *flags]
        chat = chat or Chat(parse_config(ChatConfig, words).config)
        monkeypatch.setattr("sys.stdin", io.StringIO(lines) if isinstance(lines, str) else lines)
        chat.talk()
        return chat, capsys.readouterr().out

    return talk


def shown(answer: str) -> str:
    """What is written for an answer that fills the context, as those of a random model do."""
    printable = "".join(c for c in answer if c in "\n\t" or unicodedata.category(c) != "Cc")
    return f"{printable} [cut: --max_len 48 is reached]"


def greedy(model_dir: Path, prompt: str, max_len: int = 48) -> str:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    found = model.generate(ids, do_sample=False, max_new_tokens=max_len - ids.size(1))
    return tokenizer.decode(found[0, ids.size(1) :], skip_special_tokens=True)


def test_an_answer_is_the_models_and_is_remembered_in_the_next_prompt(tiny_model_dir, talk):
    chat, text = talk("hi\n", "--apply_chat_template")
    first = greedy(tiny_model_dir, "<|user|>hi<|end|><|assistant|>")
    assert f"> {shown(first)}\n> " in text
    chat.max_len = 2048
    whole = f"<|user|>hi<|end|><|assistant|>{first}<|end|><|user|>a<|end|><|assistant|>"
    assert chat.tokenizer.decode(chat.prompt_for("a")) == whole
    assert chat.turns == [("hi", first)]


def test_without_a_chat_template_turns_follow_the_input_template(talk):
    chat, _ = talk("", "--input_template", "Q: {}\nA: ")
    chat.turns = [("one", "1"), ("two", "2")]
    found = chat.tokenizer.decode(chat.prompt_for("three"))
    assert found == "Q: one\nA: 1\nQ: two\nA: 2\nQ: three\nA: "


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "/quit"])
def test_reset_forgets_and_words_to_leave_end_the_talk_before_the_next_line(talk, word):
    chat, text = talk(f"hi\n/reset\n {word} \nnever\n")
    assert chat.turns == []
    assert "The conversation starts anew." in text and text.endswith("> ")


def test_the_end_of_input_and_blank_lines_are_no_turns(talk):
    chat, text = talk("\n  \n")
    assert chat.turns == []
    assert text.endswith("> > > \n")


def test_an_answer_cannot_steer_the_terminal(capsys):
    say("a\x1b[31mb\x07\r\nc\td\x9b")
    assert capsys.readouterr().out == "a[31mb\nc\td"


def test_the_oldest_turns_are_dropped_with_a_notice(talk):
    chat, _ = talk("", "--input_template", "{}")
    chat.turns = [("x" * 10, "y" * 5), ("z" * 8, "w" * 3)]
    # 16 + 12 tokens of turns and 12 of the line are over 36; 12 + 12 are not.
    _, text = talk("v" * 12, chat=chat)
    assert "[turns that no longer fit and left the conversation: 1]" in text
    assert [line[0] for line, _ in chat.turns] == ["z", "v"]


def test_a_line_that_never_fits_is_refused_and_the_talk_goes_on(talk):
    chat, text = talk("x" * 200 + "\n/exit\n")
    assert "Type a shorter one." in text
    assert chat.turns == []


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(talk, monkeypatch):
    stream_put, seen = AnswerStream.put, []

    def interrupt_third(self, value: torch.Tensor) -> None:
        seen.append(value)
        stream_put(self, value)
        if len(seen) == 4:  # the prompt and three tokens
            raise KeyboardInterrupt

    monkeypatch.setattr(AnswerStream, "put", interrupt_third)
    chat, text = talk("hi\n\n")
    assert text.endswith(" [stopped]\n> > \n")  # the talk went on
    assert "Goodbye" not in text
    [(_, response)] = chat.turns
    kept = [int(value) for value in seen[1:]]
    assert len(kept) == 3
    assert chat.tokenizer.decode(kept, skip_special_tokens=True).startswith(response)


def test_a_response_ends_with_a_text_or_a_token_that_stops_it(tiny_model_dir, talk):
    words = "--apply_chat_template"
    chat, _ = talk("hi\n", words)
    [(_, whole)] = chat.turns
    place = next(i for i, c in enumerate(whole) if i and c.isascii() and c.isprintable())
    [token_id] = chat.tokenizer.encode(whole[place])
    for flags in (("--stop", whole[place]), ("--stop_token_ids", str(token_id))):
        chat, _ = talk("hi\n", words, *flags)
        assert chat.turns == [("hi", whole[: whole.index(whole[place]) + 1])]


class Interrupted(io.StringIO):
    """A terminal at which Ctrl-C is pressed after its lines."""

    def readline(self, size: int = -1, /) -> str:
        line = super().readline(size)
        if not line:
            raise KeyboardInterrupt
        return line


def test_what_a_model_says_of_sampling_and_is_not_used_is_said(tiny_model_dir, tmp_path, talk):
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (model / "generation_config.json").write_text('{"repetition_penalty": 1.5}')
    said = f"not used: repetition_penalty 1.5 of the generation config of {model}. Type "
    assert said in talk("", "--pretrain", str(model))[1]


def test_ctrl_c_at_the_prompt_ends_the_talk(talk):
    chat, text = talk(Interrupted("hi\n"))
    assert len(chat.turns) == 1
    assert text.endswith("> \nGoodbye.\n")


def test_the_wish_for_a_reward_and_the_start_file_stand_in_the_prompt(talk, tmp_path):
    (tmp_path / "start.txt").write_text("Be kind.\n")
    flags = ["--ta_prompt", str(tmp_path / "start.txt"), "--enable_csft"]
    chat, _ = talk("", *flags, "--apply_chat_template")
    expected = "<|system|>Be kind.<|end|><|user|>hi<|end|><|assistant|> <rm_score>: 5.00 "
    assert chat.tokenizer.decode(chat.prompt_for("hi")) == expected


@pytest.mark.slow
def test_the_command_talks_through_its_streams_until_ctrl_c(tiny_model_dir):
    command = [sys.executable, "-m", "openrlhf.cli.interactive_chat"]
    command += ["--pretrain", str(tiny_model_dir), *GREEDY.split(), "--apply_chat_template"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        # A shell that runs the tests in the background has them, and this, ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"hi\n")
    process.stdin.flush()
    answer = greedy(tiny_model_dir, "<|user|>hi<|end|><|assistant|>")
    expected = f"> {shown(answer)}\n> ".encode()
    assert process.stdout.readline()  # the help
    assert process.stdout.read(len(expected)) == expected
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, b"\nGoodbye.\n")
    assert b"Traceback" not in err


def test_pictures_go_with_a_line_and_stay_in_the_conversation(tmp_path, monkeypatch, capsys):
    model = tiny_vision.make("qwen2_5_vl", tmp_path / "model")
    small, wide = tiny_vision.noise(28, 28), tiny_vision.noise(28, 56, 1)
    small.save(tmp_path / "small.png")
    wide.save(tmp_path / "wide.png")
    words = ["--pretrain", str(model), *GREEDY.split(), "--apply_chat_template"]
    words += ["--image", str(tmp_path / "small.png")]
    chat = Chat(parse_config(ChatConfig, words).config)
    chat.max_len = 60
    lines = f"what\n/image nowhere.png\n/image {tmp_path}/wide.png\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    chat.talk()
    assert "--image nowhere.png: " in capsys.readouterr().out
    assert [(image.width, image.height) for image in chat.images] == [(28, 28)]
    assert [(image.width, image.height) for image in chat.added] == [(56, 28)]
    chat.max_len = 2048
    ids = chat.prompt_for("\ufdd1?")
    assert ids.count(chat.processor.image_token_id) == 1 + 2
    # The first response is that of the model to the picture and the line.
    one = read_picture(small)
    text = "<|user|><|vision_start|><|image_pad|><|vision_end|>what<|end|><|assistant|>"
    encoded = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    sampling = SamplingSettings(temperature=0.0, max_new_tokens=60 - len(encoded))
    asked = GenerationRequest("r", tuple(encoded), sampling, (one,))
    hf_model = transformers.AutoModelForImageTextToText.from_pretrained(model).eval()
    [[answer]] = OwnGenerate(hf_model, processor=chat.processor).generate([asked])
    said = chat.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert chat.turns == [("\ufdd1what", said)]


def test_the_mark_of_a_picture_that_is_typed_is_no_place_for_one(tmp_path, monkeypatch, capsys):
    model = tiny_vision.make("qwen2_5_vl", tmp_path / "model")
    words = ["--pretrain", str(model), *GREEDY.split(), "--apply_chat_template"]
    chat = Chat(parse_config(ChatConfig, words).config)
    chat.max_len = 30
    monkeypatch.setattr("sys.stdin", io.StringIO("a\ufdd1b\n"))
    chat.talk()
    [(typed, _)] = chat.turns
    assert typed == "a\ufffdb"


def test_a_picture_of_a_shape_that_the_model_does_not_read_costs_a_line(
    tmp_path, monkeypatch, capsys
):
    model = tiny_vision.make("qwen2_5_vl", tmp_path / "model")
    tiny_vision.noise(1, 300).save(tmp_path / "narrow.png")
    words = ["--pretrain", str(model), *GREEDY.split(), "--apply_chat_template"]
    chat = Chat(parse_config(ChatConfig, [*words, "--image", str(tmp_path / "narrow.png")]).config)
    monkeypatch.setattr("sys.stdin", io.StringIO("what\nwhat\n"))
    chat.talk()
    assert len(chat.turns) == 1 and "300x1 pixels: absolute aspect" in capsys.readouterr().out


def test_a_picture_that_does_not_fit_costs_a_line_and_reset_forgets_those_of_the_next(
    tmp_path, monkeypatch, capsys
):
    """28x280 pixels are 10 tokens, and the limit leaves room for 15."""
    model = tiny_vision.make("qwen2_5_vl", tmp_path / "model")
    tiny_vision.noise(28, 280).save(tmp_path / "wide.png")
    words = ["--pretrain", str(model), *GREEDY.split(), "--apply_chat_template"]
    chat = Chat(parse_config(ChatConfig, words).config)
    chat.max_len = 20
    add = f"/image {tmp_path}/wide.png"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{add}\nwhat\nwhat\n{add}\n/reset\n"))
    chat.talk()
    said = capsys.readouterr().out
    assert "The line makes 19 tokens, and --max_len 20" in said
    assert "[its images are left out]" in said
    assert said.count("makes") == 1
    assert chat.turns == [] and chat.added == []


@pytest.mark.parametrize("flags", [["--apply_chat_template"], []])
def test_a_picture_that_cannot_be_shown_is_refused(tiny_model_dir, flags):
    words = ["--pretrain", str(tiny_model_dir), "--image", "a.png", *flags]
    with pytest.raises(ConfigError, match=r"--image: .* reads no images"):
        Chat(parse_config(ChatConfig, words).config)
