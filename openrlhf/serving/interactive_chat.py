"""interactive_chat: a conversation with a model in the terminal, its answers shown as they grow.

A conversation that no longer fits loses its oldest turns. Reads lines from a stream and writes text
to another, so that it can be driven without a terminal.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from transformers import TextStreamer

from openrlhf.config.serving import ChatConfig
from openrlhf.datasets.chat import RowError, fill_template, has_placeholder, render, wrap_input
from openrlhf.errors import ConfigError
from openrlhf.models.loading import default_device_type, load_causal_lm, load_config
from openrlhf.models.support import check_here, num_positions
from openrlhf.serving.post_processors import wish_template
from openrlhf.serving.served_model import load_options
from openrlhf.utils.tokenizer import (
    TextEncoder,
    Tokenizer,
    chat_template_of,
    eos_token_ids,
    load_tokenizer,
)

HELP = "Type /reset to start anew, exit to leave; Ctrl-C stops an answer, then the chat."
LEAVING = {"exit", "quit", "/exit", "/quit"}
PROMPT = "> "
COMMAND = re.compile(r"/[a-z]+")
ROOM_SHARE = 4  # at least a quarter of the context is kept for the answer


class Turn(NamedTuple):
    """What was typed and what was answered."""

    line: str
    answer: str


class Conversation:
    """Turns, made into a prompt of bounded length."""

    def __init__(self, config: ChatConfig, tokenizer: Tokenizer, *, max_len: int) -> None:
        data = config.data
        self.turns: list[Turn] = []
        self.max_len = max_len
        self._is_chat = data.apply_chat_template
        self._template = data.input_template
        self._encoder = TextEncoder(tokenizer)
        self._start = read_start(data.ta_prompt)
        csft = config.csft
        self._wish = wish_template(csft.prompt) if csft.enable else "{input}"
        if self._is_chat:
            chat_template_of(tokenizer)
        else:
            has_placeholder(self._template)

    def prompt_for(self, line: str) -> tuple[list[int], int]:
        """Return the prompt of a line, and how many old turns were dropped for them to fit.

        Raises ConfigError for a line that does not fit alone.
        """
        num_dropped = 0
        limit = self.max_len - self.max_len // ROOM_SHARE
        ids = self._encode(line)
        while len(ids) > limit and self.turns:
            self.turns.pop(0)
            num_dropped += 1
            ids = self._encode(line)
        if len(ids) > limit:
            raise ConfigError(
                f"The line makes {len(ids)} tokens, and --max_len {self.max_len} leaves room for "
                f"{limit}. Type a shorter one."
            )
        return ids, num_dropped

    def _encode(self, line: str) -> list[int]:
        text = self._chat_text(line) if self._is_chat else self._plain_text(line)
        return self._encoder.encode_prompts([wrap_input(text, self._wish)])[0]

    def _chat_text(self, line: str) -> str:
        messages: list[dict[str, object]] = []
        if self._start:
            messages.append({"role": "system", "content": self._start})
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.line})
            messages.append({"role": "assistant", "content": turn.answer})
        messages.append({"role": "user", "content": line})
        return render(self._encoder, messages, add_generation_prompt=True)

    def _plain_text(self, line: str) -> str:
        hide = self._encoder.hide
        past = [
            f"{fill_template(self._template, hide(turn.line))}{hide(turn.answer)}\n"
            for turn in self.turns
        ]
        start = [hide(self._start) + "\n"] if self._start else []
        return "".join([*start, *past, fill_template(self._template, hide(line))])


class AnswerStream(TextStreamer):
    """Writes an answer word by word, without control characters that would steer the terminal."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self._write(printable(text))


class Chat:
    """A model, a conversation and a place to write."""

    def __init__(self, config: ChatConfig, output: TextIO) -> None:
        path = config.model.model_name_or_path
        assert path is not None, "a model is needed"
        check_here(config.ds, trains=False)
        data, trust = config.data, config.trust_remote_code
        limit = num_positions(load_config(path, trust_remote_code=trust))
        self.tokenizer = load_tokenizer(
            path,
            chat_template=data.tokenizer_chat_template,
            use_fast=not data.disable_fast_tokenizer,
            trust_remote_code=trust,
        )
        max_len = min(data.max_len, limit or data.max_len)
        self.conversation = Conversation(config, self.tokenizer, max_len=max_len)
        self.stop_token_ids = eos_token_ids(path, self.tokenizer, trust_remote_code=trust)
        self.rollout = config.rollout
        self.output = output
        self.model = load_model(config, path)

    def talk(self, lines: TextIO) -> None:
        """Answer lines until `exit`, the end of input, or Ctrl-C while nothing is answered."""
        self._say(HELP + "\n")
        try:
            self._take_turns(lines)
        except KeyboardInterrupt:
            self._say("\nGoodbye.\n")

    def _take_turns(self, lines: TextIO) -> None:
        while (line := self._read(lines)) and (words := line.strip()) not in LEAVING:
            if words == "/reset":
                self.conversation.turns.clear()
                self._say("The conversation starts anew.\n")
            elif words == "/help":
                self._say(f"{HELP}\n")
            elif COMMAND.fullmatch(words):
                self._say(f"There is no command {words}. {HELP}\n")
            elif words:
                self._answer(words)
        if not line:  # the end of input stands behind the prompt
            self._say("\n")

    def _read(self, lines: TextIO) -> str:
        """Return the next line, "" at the end; one of a terminal can be edited and called back."""
        if not lines.isatty():
            self._say(PROMPT)
            return lines.readline()
        try:
            return input(PROMPT) + "\n"
        except EOFError:
            return ""

    def _answer(self, line: str) -> None:
        try:
            ids, num_dropped = self.conversation.prompt_for(line)
        except (ConfigError, RowError) as error:
            self._say(f"{error}\n")
            return
        if num_dropped:
            turns = "turn no longer fits" if num_dropped == 1 else "turns no longer fit"
            self._say(f"[{num_dropped} old {turns} and left the conversation]\n")
        stream = AnswerStream(self.tokenizer, self._say)
        try:
            found = self._generate(ids, stream)
            answer = self.tokenizer.decode(found[len(ids) :], skip_special_tokens=True)
            if len(found) >= self.conversation.max_len:
                self._say(f" [cut: --max_len {self.conversation.max_len} is reached]")
        except KeyboardInterrupt:  # stops the answer; what was said stays in the conversation
            answer = stream.text
            self._say(" [stopped]")
        self._say("\n")
        self.conversation.turns.append(Turn(line, answer))

    @torch.no_grad()
    def _generate(self, ids: Sequence[int], stream: AnswerStream) -> list[int]:
        """Return the prompt and the tokens after it."""
        rollout = self.rollout
        chance: dict[str, Any] = {"do_sample": False}
        if not rollout.is_greedy:
            chance = {"do_sample": True, "temperature": rollout.temperature, "top_k": 0}
            chance["top_p"] = rollout.top_p
        prompt = torch.tensor([ids], device=self.model.device)
        found = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            streamer=stream,
            repetition_penalty=rollout.repetition_penalty,
            max_new_tokens=self.conversation.max_len - len(ids),
            eos_token_id=list(self.stop_token_ids),
            pad_token_id=self.tokenizer.pad_token_id,
            **chance,
        )
        tokens: list[int] = found[0].tolist()
        return tokens

    def _say(self, text: str) -> None:
        self.output.write(text)
        self.output.flush()


def run_interactive_chat(config: ChatConfig) -> None:
    """Talk in this terminal."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may know fewer characters
    if sys.stdin.isatty() and importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # gives `input` its editing and its history
    Chat(config, sys.stdout).talk(sys.stdin)


def printable(text: str) -> str:
    """Return text without control characters, which would move the cursor or colour a terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def load_model(config: ChatConfig, path: str) -> Any:
    """Return the model on this machine's device."""
    model = load_causal_lm(path, **load_options(config)).eval()
    return model if config.ds.load_in_4bit else model.to(default_device_type())


def read_start(path: str | None) -> str:
    """Return the text that stands before a conversation; raises ConfigError."""
    if path is None:
        return ""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--ta_prompt {path} cannot be read: {error}. Give a text file."
        ) from error
