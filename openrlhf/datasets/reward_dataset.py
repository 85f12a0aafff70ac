"""Preference pairs for reward models and direct preference optimisation: two answers to one prompt.

A side is a whole dialogue, or the answer to the prompt column's prompt. Both sides are tokenised
as supervised rows are; the targets are what follows the prompt. Knows no loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from datasets import Dataset
from torch import Tensor

from openrlhf.config.base import Caution
from openrlhf.config.supervised import DatasetConfig
from openrlhf.datasets.chat import (
    LeftOutError,
    Message,
    RowError,
    Segment,
    cut_at_spans,
    cut_segments,
    fill_template,
    is_blank,
    plain_text,
    render_answer,
    render_dialogue,
    rendered_segments,
    text_to_learn,
    to_messages,
)
from openrlhf.datasets.conventions import (
    common_settings,
    count_rendered,
    if_given,
    recognised_line,
    rendered_notices,
    uses_chat_template,
)
from openrlhf.datasets.data_files import number_of
from openrlhf.datasets.problems import missing_column
from openrlhf.datasets.tokenized import (
    Draft,
    Row,
    RowFormat,
    TokenizedDataset,
    Tokens,
)
from openrlhf.errors import DataError

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class PreferenceFormat(RowFormat):
    """How rows become preference pairs."""

    prompt_key: str | None = None  # None: the column `prompt`, or else whole dialogues
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    with_margin: bool = False  # read how much better the chosen side is
    margin_key: str = "margin"
    max_len: int | None = 512
    drop_identical: bool = True  # pairs whose sides are the same tokens, cut or not

    @classmethod
    def of(cls, data: DatasetConfig, *, with_margin: bool = False) -> PreferenceFormat:
        """As a command's `data.*` says."""
        return cls(
            prompt_key=if_given(data, "prompt_key"),
            chosen_key=data.chosen_key,
            rejected_key=data.rejected_key,
            with_margin=with_margin,
            input_template=data.input_template,
            max_len=data.max_len,
            **common_settings(data, overlong=data.overlong_rows),
        )

    def check_columns(self, rows: Dataset) -> None:
        columns = rows.column_names
        wanted = {"--chosen_key": self.chosen_key, "--rejected_key": self.rejected_key}
        if self.prompt_key is not None:
            wanted["--prompt_key"] = self.prompt_key
        problems = [
            str(missing_column(name, columns, flag=flag))
            for flag, name in wanted.items()
            if name not in columns
        ]
        if self.with_margin and self.margin_key not in columns:
            problems.append(
                f"column '{self.margin_key}' is not in the data set; columns found: "
                f"{', '.join(columns)}. Add it, or leave --margin_loss out."
            )
        if problems:
            raise DataError(problems)


@dataclass(frozen=True)
class PreferencePair:
    """Two sequences, the first preferred; the targets of each are its response and its end."""

    chosen_ids: Tensor  # (T,) int64
    chosen_mask: Tensor  # (T,) bool, False on the prompt
    rejected_ids: Tensor  # (U,) int64
    rejected_mask: Tensor  # (U,) bool
    margin: float  # 0 without a margin column
    ref_sums: Sequence[float] | None = None  # log-probs of both under a reference, once asked


class PreferenceDataset(TokenizedDataset[PreferenceFormat]):
    """Pairs that differ and fit the length limit, in file order; raises DataError."""

    flags = "--prompt_key, --chosen_key, --rejected_key and --max_len"

    def __getitem__(self, index: int) -> PreferencePair:
        [chosen, rejected], extra = self._example(index)
        return PreferencePair(*chosen.tensors, *rejected.tensors, extra["margin"])

    def _check_columns(self) -> None:
        form, columns = self._format, self._rows.column_names
        form.check_columns(self._rows)
        self._prompt_key = form.prompt_key or ("prompt" if "prompt" in columns else None)
        names = [name for name in (self._prompt_key, form.chosen_key, form.rejected_key) if name]
        is_chat = uses_chat_template(
            form.apply_chat_template, self._rows, names, self._encoder.tokenizer
        )
        if self._prompt_key and not form.prompt_key and not is_chat:
            self._look_for_prompts_in_the_answers()
        self._format = replace(form, apply_chat_template=is_chat)
        if (is_chat and not form.apply_chat_template) or self._prompt_key != form.prompt_key:
            how = "messages, with the chat template" if is_chat else "text"
            self.notices.append(recognised_line(names, how))
        if form.input_template and is_chat and not form.apply_chat_template:
            self.notices.append(Caution("--input_template is not used for messages"))
        elif form.input_template and self._prompt_key is None and not is_chat:
            self.notices.append(Caution("--input_template is not used: there is no prompt column"))
        if (column := self._prompt_key) is not None:
            encoder = self._encoder
            num = count_rendered(self._rows, column, encoder, apply_chat_template=is_chat)
            self.notices += rendered_notices(num, len(self._rows))

    def _look_for_prompts_in_the_answers(self) -> None:
        """Texts that all begin with their prompt hold it already: a column nobody named is then
        not used.
        """
        form, column, total = self._format, self._prompt_key, len(self._rows)
        names = [name for name in (column, form.chosen_key, form.rejected_key) if name]
        texts = zip(*(self._rows[name] for name in names), strict=True)
        num_held = sum(_begin_alike(*row) for row in texts)
        if num_held == total > 0:
            self._prompt_key = None
            self.notices.append(
                Caution(
                    f"column '{column}' was not used: both answers of every row hold their prompt. "
                    f"Type --prompt_key {column} to put it before them"
                )
            )

    @property
    def recognised(self) -> dict[str, object]:
        """Settings of the config, dotted, that say how the rows are read."""
        asked, found = self._format.prompt_key, self._prompt_key
        return {**super().recognised, "data.prompt_key": asked if self._num_whole else found}

    @property
    def _num_whole(self) -> int:
        """Pairs of dialogues with a prompt of their own, beside that of a column nobody named."""
        return sum(extra["is_whole"] for extra in self._extras())

    def _report(self) -> None:
        super()._report()
        if self._num_whole:
            self.notices.append(
                Caution(
                    f"column '{self._prompt_key}' was not used in {self._num_whole} of "
                    f"{len(self._rows)} rows: both answers hold their prompt"
                )
            )

    def _draft(self, row: Row) -> Draft:
        form = self._format
        margin = self._margin(row)
        sides = [form.chosen_key, form.rejected_key]
        if self._prompt_key is not None and self._is_rendered(row, self._prompt_key):
            return self._rendered_draft(row, plain_text(row[self._prompt_key], "prompt"), margin)
        if form.apply_chat_template:
            return self._chat_draft(row, sides, margin)
        extra = {"margin": margin, "is_whole": False}
        answers = [
            Segment(self._side_text(row[name], name), is_target=True, is_cut=_is_cut(row, side))
            for name, side in zip(sides, SIDES, strict=True)
        ]
        if self._prompt_key is None:
            return Draft([[answer] for answer in answers], extra)
        prompt = self._encoder.plain(plain_text(row[self._prompt_key], self._prompt_key))
        start = Segment(fill_template(form.input_template, prompt), is_target=False)
        return Draft([[start, answer] for answer in answers], extra)

    def _rendered_draft(self, row: Row, prompt: str, margin: float) -> Draft:
        """Both answers behind a prompt that was rendered before."""
        names = (self._format.chosen_key, self._format.rejected_key)
        texts = [text_to_learn(self._response_text(row[name]), name) for name in names]
        sides = [
            rendered_segments(self._encoder, prompt, text, is_cut=_is_cut(row, side))
            for text, side in zip(texts, SIDES, strict=True)
        ]
        return Draft(sides, {"margin": margin, "is_whole": False})

    def _side_text(self, value: object, column: str) -> str:
        return self._encoder.plain(text_to_learn(self._response_text(value), column))

    def _margin(self, row: Row) -> float:
        if not self._format.with_margin:
            return 0.0
        value = row[self._format.margin_key]
        number = None if isinstance(value, bool) else number_of(value)
        if number is None:
            raise RowError(f"'{self._format.margin_key}' is {value!r}, not a number")
        if not math.isfinite(number):
            raise RowError(f"'{self._format.margin_key}' is {value}")
        return number

    def _chat_draft(self, row: Row, names: Sequence[str], margin: float) -> Draft:
        prompt = None if self._prompt_key is None else to_messages(row[self._prompt_key])
        dialogues = [self._dialogue(prompt, row[name], name) for name in names]
        num_shared = _num_shared(*(dialogue[:-1] for dialogue in dialogues))
        sides = [
            self._side_segments(dialogue, num_shared, row, is_cut=_is_cut(row, side))
            for dialogue, side in zip(dialogues, SIDES, strict=True)
        ]
        is_whole = prompt is not None and any(d[: len(prompt)] != prompt for d in dialogues)
        return Draft(sides, {"margin": margin, "is_whole": is_whole})

    def _dialogue(self, prompt: list[Message] | None, value: object, name: str) -> list[Message]:
        """All messages of a side; what begins with no answer holds its prompt itself."""
        messages = to_messages(self._response_text(value), text_role="assistant")
        if is_blank(messages[-1]):
            raise LeftOutError("empty response")
        if prompt is None:
            return messages
        if messages[0]["role"] == "assistant":
            return prompt + messages
        if self._format.prompt_key is not None and messages[: len(prompt)] != prompt:
            raise RowError(f"'{name}' begins neither with an answer nor with the prompt's messages")
        return messages

    def _side_segments(
        self, messages: list[Message], num_shared: int, row: Row, *, is_cut: bool
    ) -> list[Segment]:
        """A side whose targets are the assistant's turns behind the messages both sides share."""
        tools = row.get("tools")
        if len(messages) == num_shared + 1:
            rendered = render_answer(self._encoder, messages, tools=tools)
        else:
            rendered = render_dialogue(self._encoder, messages, tools=tools)
            num_known = sum(message["role"] == "assistant" for message in messages[:num_shared])
            rendered = replace(rendered, assistant_spans=rendered.assistant_spans[num_known:])
        if is_cut:
            return cut_segments(self._encoder, rendered, messages[-1])
        return cut_at_spans(rendered.text, rendered.assistant_spans)

    def _refine(self, draft: Draft, sequences: list[Tokens]) -> list[Tokens]:
        """Sides without a prompt of their own part where their tokens do."""
        if any(len(segments) > 1 for segments in draft.sequences):
            return sequences
        num_shared = _num_shared(*(tokens.ids for tokens in sequences))
        return [
            Tokens(ids, [flag and i >= num_shared for i, flag in enumerate(mask)])
            for ids, mask in sequences
        ]

    def _reason_to_leave_out(self, sequences: list[Tokens]) -> str:
        chosen, rejected = sequences
        if chosen.ids == rejected.ids:
            return "chosen and rejected are the same" if self._format.drop_identical else ""
        return super()._reason_to_leave_out(sequences)


def _begin_alike(prompt: object, *answers: object) -> bool:
    """Whether all answers, if these are texts, begin with the prompt."""
    if not isinstance(prompt, str) or not prompt:
        return False
    return all(isinstance(answer, str) and answer.startswith(prompt) for answer in answers)


def _is_cut(row: Row, side: str) -> bool:
    """Whether `batch_inference` notes that this side's answer met its limit of tokens."""
    return row.get(f"{side}_finish_reason") == "length"


def _num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items two sequences begin with alike."""
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
    prompt = ""
    if prompt_key and apply_chat_template is None:
        prompt = fill_template(input_template, plain_text(data[prompt_key], prompt_key))
    sides = []
    for side in (chosen_key, rejected_key):
        if apply_chat_template is None:
            sides.append(plain_text(data[side], side))
            continue
        messages = to_messages(data[prompt_key]) if prompt_key else []
        messages += to_messages(data[side], text_role="assistant")
        prompt = apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        sides.append(apply_chat_template(messages, tokenize=False).removeprefix(prompt))
    return prompt, sides[0], sides[1], float(number_of(data.get("margin")) or 0)
