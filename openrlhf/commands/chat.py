"""`openrlhf chat`: a conversation with a model in the terminal, its responses shown as they grow.

A conversation that no longer fits loses its oldest turns.
"""

import importlib.util
import sys
import unicodedata
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from openrlhf.config.serving import ChatConfig
from openrlhf.datasets.chat import (
    RowError,
    fill_template,
    has_placeholder,
    render,
    wish_template,
    wrap_input,
)
from openrlhf.datasets.template_fields import PICTURE
from openrlhf.errors import ConfigError
from openrlhf.models.loading import (
    default_device_type,
    image_processor_of,
    load_causal_lm,
    load_config,
)
from openrlhf.models.support import check_here, num_positions
from openrlhf.utils.images import Picture, PictureError, read_picture
from openrlhf.utils.tokenizer import (
    TextEncoder,
    chat_template_of,
    check_stop_ids,
    eos_token_ids,
    tokenizer_of,
    unused_sampling,
)

ADD_IMAGE = "/image "
HELP = "Type /reset to start anew, exit to leave; Ctrl-C stops an answer, then the chat.\n"
LEAVING = {"exit", "quit", "/exit", "/quit"}
PROMPT = "> "
CUTS = ("top_k", "min_p")
ROOM_SHARE = 4  # at least a quarter of the context is kept for the response


class AnswerStream(TextStreamer):
    """Writes a response word by word and keeps its text."""

    text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        say(text)


class Chat:
    """A model and the conversation with it, on standard input and output."""

    def __init__(self, config: ChatConfig) -> None:
        path = config.model.model_name_or_path
        assert path is not None, "a model is needed"
        check_here(config.ds, trains=False)
        data, trust = config.data, config.trust_remote_code
        model_config = load_config(path, trust_remote_code=trust)
        check_stop_ids(config.rollout.stop_token_ids, model_config.get_text_config().vocab_size)
        limit = num_positions(model_config)
        for line in unused_sampling(path, config.rollout.token_choice):
            say(f"{line}\n")
        self.config = config
        self.max_len = min(data.max_len, limit or data.max_len)
        self.tokenizer = tokenizer_of(config, path)
        if data.apply_chat_template:
            chat_template_of(self.tokenizer)
        else:
            has_placeholder(data.input_template)
        self.turns: list[tuple[str, str]] = []  # what was typed, and the response
        self.images: list[Picture] = []  # of all turns; what was typed has a PICTURE for each
        self.added: list[Picture] = []  # those of the next line
        self.processor = image_processor_of(config, path, model_config)
        for file in filter(None, (config.image or "").split(",")):
            self.add_image(file)
        self._start = ""
        if data.ta_prompt is not None:
            self._start = Path(data.ta_prompt).expanduser().read_text(errors="replace").strip()
        self._encoder = TextEncoder(self.tokenizer)
        self._stop_token_ids = eos_token_ids(path, self.tokenizer, trust_remote_code=trust)
        model = load_causal_lm(path, config).eval()
        self._model: Any = model if config.ds.load_in_4bit else model.to(default_device_type())

    def talk(self) -> None:
        """Respond to lines until `exit`, the end of input, or Ctrl-C at the prompt."""
        say(HELP)
        try:
            while (line := input(PROMPT).strip()) not in LEAVING:
                if line == "/reset":
                    self.turns.clear()
                    self.images.clear()
                    self.added.clear()
                    say("The conversation starts anew.\n")
                elif line.startswith(ADD_IMAGE):
                    self._add(line.removeprefix(ADD_IMAGE).strip())
                elif line:
                    self._respond(PICTURE * len(self.added) + without_mark(line))
        except EOFError:
            say("\n")
        except KeyboardInterrupt:
            say("\nGoodbye.\n")

    def add_image(self, file: str) -> None:
        """Put a picture before the next line; raise ConfigError for one that cannot be read."""
        if self.processor is None or not self.config.data.apply_chat_template:
            raise ConfigError(
                f"--image {file}: only a model that reads images, with --apply_chat_template, "
                "can be shown one. Type both, or leave --image out."
            )
        try:
            self.added.append(read_picture(Path(file).expanduser()))
        except PictureError as error:
            raise ConfigError(f"--image {file}: {error}.") from error

    def _add(self, file: str) -> None:
        try:
            self.add_image(file)
            say("[the image goes with the next line]\n")
        except ConfigError as error:
            say(f"{error}\n")

    def prompt_for(self, line: str) -> list[int]:
        """Return the prompt of a line; old turns are dropped for it to fit.

        Raises ConfigError for a line that does not fit alone.
        """
        num_turns = len(self.turns)
        limit = self.max_len - self.max_len // ROOM_SHARE
        while len(ids := self._encode(line)) > limit:
            if not self.turns:
                raise ConfigError(
                    f"The line makes {len(ids)} tokens, and --max_len {self.max_len} leaves room "
                    f"for {limit}. Type a shorter one."
                )
            typed, _ = self.turns.pop(0)
            del self.images[: typed.count(PICTURE)]
        if num_dropped := num_turns - len(self.turns):
            say(f"[turns that no longer fit and left the conversation: {num_dropped}]\n")
        return ids

    def _encode(self, line: str) -> list[int]:
        hide, data = self._encoder.hide, self.config.data
        if data.apply_chat_template:
            messages: list[dict[str, object]] = []
            if self._start:
                messages.append({"role": "system", "content": self._start})
            for typed, response in self.turns:
                messages.append({"role": "user", "content": typed})
                messages.append({"role": "assistant", "content": response})
            messages.append({"role": "user", "content": line})
            text = render(self._encoder, messages, add_generation_prompt=True)
        else:
            text = hide(self._start) + "\n" if self._start else ""
            for typed, response in self.turns:
                text += f"{fill_template(data.input_template, hide(typed))}{hide(response)}\n"
            text += fill_template(data.input_template, hide(line))
        if self.config.csft.enable:
            text = wrap_input(text, wish_template(self.config.csft.prompt))
        ids = self._encoder.encode_prompt(text)
        return ids if self.processor is None else self.processor.expand(ids, self._seen)

    @property
    def _seen(self) -> list[Picture]:
        """Return the pictures of the conversation and of the next line."""
        return [*self.images, *self.added]

    def _respond(self, line: str) -> None:
        try:
            prompt = torch.tensor([self.prompt_for(line)], device=self._model.device)
        except (ConfigError, PictureError, RowError) as error:
            say(f"{error}\n")
            if self.added:
                say("[its images are left out]\n")
                self.added.clear()
            return
        rollout, chance, sees = self.config.rollout, {}, dict[str, Any]()
        if not rollout.is_greedy:
            chance = {name: getattr(rollout, name) for name in ("temperature", "top_p", *CUTS)}
        if self.processor is not None:
            sees = self.processor.inputs(self._seen, prompt)
            sees["suppress_tokens"] = [*self.processor.banned_token_ids]
        stream = AnswerStream(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        try:
            found = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                streamer=stream,
                do_sample=not rollout.is_greedy,
                repetition_penalty=rollout.repetition_penalty,
                max_new_tokens=self.max_len - prompt.size(1),
                eos_token_id=[*self._stop_token_ids, *(rollout.stop_token_ids or ())],
                stop_strings=list(rollout.stop) if rollout.stop else None,
                tokenizer=self.tokenizer,
                pad_token_id=self.tokenizer.pad_token_id,
                **sees,
                **chance,
            )
            if found.size(1) >= self.max_len:
                say(f" [cut: --max_len {self.max_len} is reached]")
        except KeyboardInterrupt:  # stops the response; what was said stays in the conversation
            say(" [stopped]")
        say("\n")
        self.turns.append((line, without_mark(stream.text)))
        self.images, self.added = self._seen, []


def without_mark(text: str) -> str:
    """Return a text without the mark of an image."""
    return text.replace(PICTURE, "\ufffd")


def run_interactive_chat(config: ChatConfig) -> None:
    """Talk in this terminal."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may know fewer characters
    if sys.stdin.isatty() and importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # gives `input` its editing and its history
    Chat(config).talk()


def say(text: str) -> None:
    """Write text without control characters, which would move the cursor or colour a terminal."""
    printable = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
    sys.stdout.write(printable)
    sys.stdout.flush()
