"""Preference pairs for reward models and direct preference optimisation: two answers to one prompt.

A side is a whole dialogue, or the answer to the prompt column's prompt. Both sides are tokenised
as supervised rows are; the targets are what follows the prompt. Knows no loss.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from datasets import Dataset
from torch import Tensor

from openrlhf.config.base import Caution
from openrlhf.datasets.chat import (
    LeftOutError,
    Message,
    Rendered,
    RowError,
    is_blank,
    plain_text,
    render_dialogue,
)
from openrlhf.datasets.pictures import values_in
from openrlhf.datasets.sft_dataset import preprocess_data as answered_texts
from openrlhf.datasets.template_fields import REASONING
from openrlhf.datasets.tokenized import (
    Row,
    RowFormat,
    Tokenised,
    TokenizedDataset,
    Tokens,
    columns_of,
    number_of,
    pick_columns,
    value_at,
)
from openrlhf.errors import DataError
from openrlhf.utils.images import Picture

PROMPTS = ("prompt", "instruction", "question", "input")


@dataclass(frozen=True)
class PreferencePair:
    """Two sequences, the first preferred; the targets of each are its response and its end.

    Example: prompt [7] with [8, 2] before [9, 2]: `chosen_ids` [7, 8, 2], `chosen_mask` [F, T, T].
    """

    chosen_ids: Tensor  # (T,) int64
    chosen_mask: Tensor  # (T,) bool, False on the prompt
    rejected_ids: Tensor  # (U,) int64
    rejected_mask: Tensor  # (U,) bool
    margin: float  # 0 without a margin column
    ref_sums: Sequence[float] | None = None  # log-probs of both under a reference, once asked
    images: tuple[Picture, ...] = ()  # of each side; each has its run of placeholders


class PreferenceDataset(TokenizedDataset):
    """Pairs that differ and fit the length limit, in file order; raises DataError."""

    flags = "--prompt_key, --chosen_key, --rejected_key and --max_len"

    def __getitem__(self, index: int) -> PreferencePair:
        [chosen, rejected], margin = self._example(index)
        return PreferencePair(*chosen, *rejected, margin, images=self.images(index))

    def _image_columns(self, row: Row) -> list[str]:
        form = self._format
        others = {form.rejected_key}
        if form.prompt_key and self._holds_prompt(row, form.chosen_key):
            others.add(form.prompt_key)
        return [name for name in super()._image_columns(row) if name not in others]

    def _pictures(self, row: Row, row_id: int) -> tuple[Picture, ...]:
        sides = (self._format.chosen_key, self._format.rejected_key)
        found = [values_in(value_at(row, name)) if name else [] for name in sides]
        chosen, rejected = ([each for each in side if each is not None] for side in found)
        if rejected and rejected != chosen:
            raise RowError("the images of both sides differ, and both are read with the same ones")
        return super()._pictures(row, row_id)

    @classmethod
    def find_columns(cls, form: RowFormat, rows: Dataset) -> list[str]:
        """Return the columns of both sides, behind that of a prompt: one of PROMPTS, if it is
        there, or else sides are whole dialogues.
        """
        columns, prompt = columns_of(rows, form), []
        if form.prompt_key is not None or {*PROMPTS} & {*columns}:
            prompt = [(form.prompt_key, PROMPTS, "--prompt_key")]
        sides = [(form.chosen_key, (), "--chosen_key"), (form.rejected_key, (), "--rejected_key")]
        found = pick_columns(columns, *prompt, *sides)
        if form.with_margin and "margin" not in columns:
            raise DataError(
                f"column 'margin' is not in the data set; columns found: {', '.join(columns)}. "
                "Add it, or leave --margin_loss out."
            )
        return found

    def _settle(self) -> None:
        form, names = self._format, self._columns
        prompt = names[0] if len(names) > 2 else None
        is_chat = self._uses_chat_template(names)
        is_asked = prompt and not form.prompt_key
        num_held, num_rows = self._num_holding_prompt(names) if is_asked else (0, -1)
        if 0 < num_held < num_rows and not is_chat:
            told = f"both answers of {num_held} of {num_rows} rows begin with their prompt, "
            self.notices.append(Caution(f"{told}and it is put before them again"))
        elif num_held == num_rows:
            held = "both answers of every row hold their prompt"
            if is_chat:
                told = f"{held}, and the chat template puts column '{prompt}' before them, too. "
                told += "Leave --apply_chat_template out, or cut the prompt from the answers"
            else:
                told = f"column '{prompt}' was not used: {held}. "
                told += f"Type --prompt_key {prompt} to put it before them"
                prompt, names = None, names[1:]
            self.notices.append(Caution(told))
        self._format = replace(form, prompt_key=prompt, apply_chat_template=is_chat)
        how = "text" if prompt else "text without a prompt column"
        how = self._words_of_chat(names) if is_chat else how
        self._say_read(names, how, fills_template=prompt is not None and not is_chat)

    def _num_holding_prompt(self, names: Sequence[str]) -> tuple[int, int]:
        """Return the number of rows whose responses are texts that begin with their prompt, and of
        all that are no damaged records.
        """
        num_held = num_rows = 0
        for row in zip(*map(self._values, names), strict=True):
            prompt, *answers = row
            is_text = bool(prompt) and all(isinstance(text, str) for text in row)
            num_held += is_text and all(answer.startswith(prompt) for answer in answers)
            num_rows += any(row)
        return num_held, num_rows

    def _values(self, name: str) -> Iterable[object]:
        rows = self._rows
        return rows[name] if name in rows.column_names else (value_at(row, name) for row in rows)

    def _unread_columns(self, read: set[str]) -> list[str]:
        margin = {"margin"} if self._format.with_margin else set()
        return super()._unread_columns(read | margin)

    def _tokens_of(self, row: Row) -> Tokenised:
        form, margin = self._format, 0.0
        if form.with_margin:
            number = number_of(row["margin"])
            if number is None or not math.isfinite(number):
                raise RowError(f"'margin' is {row['margin']!r}, not a number")
            margin = number
        chosen, rejected = map(self._encode, self._sides(row))
        if form.prompt_key is None and not form.apply_chat_template:  # they part where tokens do
            num_shared = _num_shared(chosen.ids, rejected.ids)
            chosen, rejected = (
                Tokens(ids, [flag and i >= num_shared for i, flag in enumerate(mask)])
                for ids, mask in (chosen, rejected)
            )
        return [chosen, rejected], margin

    def _sides(self, row: Row) -> list[Rendered]:
        """Return both sides; of dialogues the assistant's turns behind the messages that they share
        are learnt.
        """
        form, prompt = self._format, self._format.prompt_key
        sides = [  # column, and True for an answer that met its limit, says `infer`
            (form.chosen_key, row.get("chosen_finish_reason") == "length"),
            (form.rejected_key, row.get("rejected_finish_reason") == "length"),
        ]
        if not form.apply_chat_template or (prompt and self._is_rendered(row, prompt)):
            return [self._answered(row, prompt, name, is_cut=is_cut) for name, is_cut in sides]
        chosen, rejected = (self._dialogue(row, name) for name, _ in sides)
        asked = _prompt_of(chosen)
        if asked != _prompt_of(rejected):
            raise LeftOutError("chosen and rejected have different prompts")
        # They may differ in blanks at their ends: both responses are to the same one.
        dialogues = [chosen, chosen[: len(asked)] + rejected[len(asked) :]]
        first = _num_shared(*(list(map(_words_of, dialogue[:-1])) for dialogue in dialogues))
        if any(dialogue[first]["role"] != "assistant" for dialogue in dialogues):
            raise LeftOutError("chosen and rejected have different prompts")
        return [
            render_dialogue(self._encoder, messages, first=first, is_cut=is_cut, **self._told(row))
            for messages, (_, is_cut) in zip(dialogues, sides, strict=True)
        ]

    def _dialogue(self, row: Row, name: str) -> list[Message]:
        """Return all messages of a side; what begins with no answer holds its prompt itself."""
        prompt, row = self._format.prompt_key, {**row, name: self._response(row, name)}
        if not prompt and isinstance(row[name], str):
            remedy = "Give whole dialogues, or the column of prompts with --prompt_key"
            raise RowError(f"'{name}' is text without its prompt. {remedy}")
        read = partial(self._messages, row)
        messages = read(name, text_role="assistant", begins=False)
        if is_blank(messages[-1]):
            raise LeftOutError("empty response")
        if prompt and not self._holds_prompt(row, name):
            return read(prompt) + messages
        messages = read(name)
        if prompt and row[prompt] and any(asked not in messages for asked in read(prompt)):
            self._encoder.unread.add(f"'{prompt}' of rows whose answers hold another prompt")
        return messages

    def _holds_prompt(self, row: Row, name: str) -> bool:
        """Return True for a side that begins with no answer, and so is a whole dialogue."""
        first, *_ = self._messages(row, name, text_role="assistant", begins=False)
        return first["role"] != "assistant"

    def _check_useful(self, tokens: list[Tokens]) -> None:
        chosen, rejected = tokens
        if chosen.ids == rejected.ids:
            raise LeftOutError("chosen and rejected are the same")
        super()._check_useful(tokens)


def _prompt_of(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return who says what before the first answer; other keys, such as ids, do not matter."""
    asked = takewhile(lambda message: message["role"] != "assistant", messages)
    return [(message["role"], str(message["content"]).strip()) for message in asked]


def _words_of(message: Message) -> tuple[object, ...]:
    """Return the words of a message and who says them, without keys such as ids."""
    said = ("tool_calls", *REASONING)
    return (*_prompt_of([{**message, "role": "user"}]), message["role"], *map(message.get, said))


def _num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the number of items two sequences begin with alike."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def preprocess_data(
    data: Mapping[str, object],
    input_template: str | None = None,
    prompt_key: str | None = None,
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    apply_chat_template: Callable[..., str] | None = None,
) -> tuple[str, str, str, float]:
    """Return prompt, chosen and rejected response of a row as texts, and its `margin` or 0;
    `apply_chat_template` is the tokenizer's method. Without `prompt_key` message lists hold their
    prompt, and texts have none.

    For scripts that prepare data as they did for OpenRLHF.
    """
    sides, apply = (chosen_key, rejected_key), apply_chat_template
    if prompt_key:
        pairs = [answered_texts(data, input_template, prompt_key, name, apply) for name in sides]
    elif apply is not None:
        pairs = [answered_texts(data, None, name, None, apply) for name in sides]
    else:
        pairs = [("", plain_text(data[name], name)) for name in sides]
    (prompt, chosen), (_, rejected) = pairs
    return prompt, chosen, rejected, float(number_of(data.get("margin")) or 0)
