"""Supervised examples: token ids and the mask of tokens that are learned.

Prompt and response are tokenised apart, exactly as at inference, where the prompt's tokens are
fixed before the response begins. The mask covers the response and its end; with pretrain_mode every
token but the first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset
from torch import Tensor

from openrlhf.config.base import Caution
from openrlhf.datasets.chat import (
    RENDERED,
    LeftOutError,
    Rendered,
    ends_each_turn,
    fill_template,
    plain_text,
    render_dialogue,
    rewrites_turns,
    to_messages,
    without_answer,
)
from openrlhf.datasets.tokenized import (
    TEXT_COLUMNS,
    Row,
    RowFormat,
    Tokenised,
    TokenizedDataset,
    columns_of,
    holds_dialogues,
    pick_columns,
    prompt_columns,
)
from openrlhf.errors import ConfigError, DataError
from openrlhf.utils.images import Picture

COMPLETION = "completion"  # column of a response, which may be of several turns
LIKELY_ANSWERS = ("output", "response", COMPLETION, "answer")  # columns that a remedy names
Columns = tuple[str, str | None]  # prompt, answer; None: the prompt's column holds the answer too


@dataclass(frozen=True)
class SFTExample:
    """One sequence to learn from.

    Example: prompt [7, 8] and response [9, 2]: `token_ids` [7, 8, 9, 2], `loss_mask` [F, F, T, T].
    """

    token_ids: Tensor  # (T,) int64
    loss_mask: Tensor  # (T,) bool, False on the first token (nothing predicts it)
    # Each has its run of placeholders in the token ids.
    images: tuple[Picture, ...] = field(default=(), kw_only=True)


class SFTDataset(TokenizedDataset):
    """Rows of a prompt and its response, in two columns or in one dialogue, in file order; raises
    DataError.
    """

    flags = "--input_key, --output_key and --max_len"

    def __getitem__(self, index: int) -> SFTExample:
        [tokens], _ = self._example(index)
        return SFTExample(*tokens, images=self.images(index))

    @classmethod
    def find_columns(cls, form: RowFormat, rows: Dataset) -> Columns:
        """Return the columns that flags name, or else the first of the usual ones with an
        answer.
        """
        found = columns_of(rows, form)
        usual = prompt_columns(found)
        if form.pretrain_mode:
            return pick_columns(found, (form.input_key, TEXT_COLUMNS, form.text_flag))[0], None
        is_named = form.input_key is not None or form.output_key is not None
        is_inferred = {"input", "output", RENDERED} <= {*found}
        if not is_named and is_inferred:  # `infer` keeps columns of its data beside them
            return "input", "output"
        output = [(form.output_key, (), "--output_key")] if form.output_key is not None else []
        prompt, *_ = pick_columns(found, (form.input_key, usual, "--input_key"), *output)
        for name in [prompt] if is_named else [name for name in usual if name in found]:
            answers = [form.usual_output, COMPLETION if name == "prompt" else None]
            answer = form.output_key or next((a for a in answers if a in found), None)
            has_own = (is_named or name != "prompt") and holds_dialogues(rows, name)
            if answer is not None or has_own or _is_whole_text(form, (name, None), rows):
                return name, answer
        if not is_named and {"instruction", "output"} <= {*found}:  # Alpaca's
            return "instruction", "output"
        likely = next((name for name in LIKELY_ANSWERS if name in found), "NAME")
        # Named, Alpaca's `instruction` would be read without the `input` behind it.
        prompt = "" if prompt == "instruction" else f"--input_key {prompt} "
        raise DataError(
            f"no response column is given; columns found: {', '.join(found)}. Type {prompt}"
            f"--output_key {likely}."
        )

    def _settle(self) -> None:
        form, rows = self._format, self._rows
        self.input_column, self.output_column = self._columns
        is_text = _is_whole_text(form, (self.input_column, self.output_column), rows)
        if is_text:
            self.flags = f"{form.text_flag} and --max_len"
        is_chat = not is_text and self._uses_chat_template(self._columns)
        if form.multiturn and not is_chat:
            raise ConfigError(
                "--multiturn finds turns in a chat template. Add --apply_chat_template."
            )
        has_turns = self.output_column == COMPLETION and holds_dialogues(rows, COMPLETION)
        self._learns_turns = not (is_chat and has_turns and rewrites_turns(self._encoder))
        if not (self._learns_turns or form.multiturn):
            told = "of a completion of several messages only the last one is learnt, as the chat "
            told += "template rewrites earlier ones. Give one with {% generation %} markers with "
            self.notices.append(Caution(f"{told}--tokenizer_chat_template"))
        if form.multiturn and not ends_each_turn(self._encoder):
            told = "the chat template writes no end token behind earlier turns, so only the last "
            told += "turn of a row teaches to stop. Give one that ends each turn with "
            self.notices.append(Caution(f"--multiturn: {told}--tokenizer_chat_template"))
        self._format = replace(form, apply_chat_template=is_chat, pretrain_mode=is_text)
        how = "text, of which every token is learnt" if is_text else "text"
        is_plain = not is_text and not is_chat and RENDERED not in rows.column_names
        how = self._words_of_chat(self._columns) if is_chat else how
        self._say_read(self._columns, how, fills_template=is_plain)

    def asked(self, row: Row) -> Any:
        """Return the prompt of a row: messages, or text as the model reads it."""
        column, row = self.input_column, self.read(row)
        if self._format.apply_chat_template and not isinstance(row[column], str):
            return without_answer(self._messages(row, column))
        return self._encoder.reveal(self._prompt_text(row, column))

    def _tokens_of(self, row: Row) -> Tokenised:
        return [self._encode(self._rendered(row))], None

    def _rendered(self, row: Row) -> Rendered:
        column, answer, form = self.input_column, self.output_column, self._format
        is_cut = row.get("finish_reason") == "length"  # says `infer`
        if form.pretrain_mode:
            return self._answered(row, None, column, is_cut=False)
        if not form.apply_chat_template or (answer and self._is_rendered(row, column)):
            return self._answered(row, column, answer or column, is_cut=is_cut)
        messages = self._messages(row, column)
        num_asked = len(messages)
        if answer is not None:
            row = {**row, answer: self._response(row, answer)}
            messages += self._messages(row, answer, text_role="assistant", begins=False)
        if not any(message["role"] == "assistant" for message in messages):
            raise LeftOutError("no assistant turn")
        first = 0 if form.multiturn else len(messages) - 1
        if answer == COMPLETION and not isinstance(row[answer], str) and self._learns_turns:
            first = num_asked  # such a completion is learnt whole, as its format means it
        context = messages[0 if answer is None else num_asked : first]
        if any(message["role"] == "assistant" for message in context):
            self._encoder.unread.add("earlier answers as targets (--multiturn learns them)")
        told = self._told(row)
        return render_dialogue(self._encoder, messages, first=first, is_cut=is_cut, **told)


def _is_whole_text(form: RowFormat, columns: Columns, rows: Dataset) -> bool:
    """Return True if every token of the prompt column is learnt, and nothing else."""
    if form.pretrain_mode is not None:
        return form.pretrain_mode
    is_text = columns == ("text", None) and not holds_dialogues(rows, "text")
    return is_text and not form.apply_chat_template


def preprocess_data(
    data: Mapping[str, object],
    input_template: str | None = None,
    input_key: str = "input",
    output_key: str | None = None,
    apply_chat_template: Callable[..., str] | None = None,
) -> tuple[str, str]:
    """Return prompt and response of a row as texts; `apply_chat_template` is the tokenizer's
    method. Without `output_key` the response is the last message, or empty.

    For scripts that prepare data as they did for OpenRLHF.
    """
    if apply_chat_template is None:
        prompt = fill_template(input_template, plain_text(data[input_key], input_key))
        return prompt, plain_text(data[output_key], output_key) if output_key else ""
    messages = to_messages(data[input_key])
    if output_key:
        messages += to_messages(data[output_key], text_role="assistant")
    prompt = apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    return prompt, apply_chat_template(messages, tokenize=False).removeprefix(prompt)
