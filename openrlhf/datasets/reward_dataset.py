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
    to_messages,
)
from openrlhf.datasets.conventions import (
    common_settings,
    if_given,
    number_of,
    recognised_line,
    uses_chat_template,
)
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
        [chosen, rejected], margin = self._example(index)
        return PreferencePair(*chosen.tensors, *rejected.tensors, margin)

    def _check_columns(self) -> None:
        asked, columns = self._format, self._rows.column_names
        asked.check_columns(self._rows)
        prompt = asked.prompt_key or ("prompt" if "prompt" in columns else None)
        names = [name for name in (prompt, asked.chosen_key, asked.rejected_key) if name]
        is_chat = uses_chat_template(
            asked.apply_chat_template, self._rows, names, self._encoder.tokenizer
        )
        if prompt and not asked.prompt_key and not is_chat and self._is_in_answers(names):
            self.notices.append(
                Caution(
                    f"column '{prompt}' was not used: both answers of every row hold their prompt. "
                    f"Type --prompt_key {prompt} to put it before them"
                )
            )
            prompt = None
        self._format = replace(asked, prompt_key=prompt, apply_chat_template=is_chat)
        is_found = is_chat and not asked.apply_chat_template
        if is_found or prompt != asked.prompt_key:
            how = "messages, with the chat template" if is_chat else "text"
            self.notices.append(recognised_line(names, how))
        if asked.input_template and is_found:
            self.notices.append(Caution("--input_template is not used for messages"))
        elif asked.input_template and prompt is None and not is_chat:
            self.notices.append(Caution("--input_template is not used: there is no prompt column"))

    def _is_in_answers(self, names: Sequence[str]) -> bool:
        """Return True if both answers of every row are texts that begin with its prompt."""
        return all(
            all(isinstance(text, str) for text in (prompt, *answers))
            and prompt
            and all(answer.startswith(prompt) for answer in answers)
            for prompt, *answers in zip(*(self._rows[name] for name in names), strict=True)
        )

    @property
    def recognised(self) -> dict[str, object]:
        return {**super().recognised, "data.prompt_key": self._format.prompt_key}

    def _draft(self, row: Row) -> Draft:
        form, encoder, margin = self._format, self._encoder, self._margin(row)
        sides = [
            (name, row.get(f"{side}_finish_reason") == "length")  # says `batch_inference`
            for name, side in zip((form.chosen_key, form.rejected_key), SIDES, strict=True)
        ]
        if form.prompt_key is not None and self._is_rendered(row, form.prompt_key):
            prompt = plain_text(row[form.prompt_key], "prompt")
            texts = [self._response_text(row, name) for name, _ in sides]
            segments = [
                rendered_segments(encoder, prompt, text, is_cut=is_cut)
                for text, (_, is_cut) in zip(texts, sides, strict=True)
            ]
            return Draft(segments, margin)
        if form.apply_chat_template:
            return Draft(self._chat_segments(row, sides), margin)
        answers = [
            Segment(encoder.plain(self._response_text(row, name)), is_target=True, is_cut=is_cut)
            for name, is_cut in sides
        ]
        if form.prompt_key is None:
            return Draft([[answer] for answer in answers], margin)
        prompt = encoder.plain(plain_text(row[form.prompt_key], form.prompt_key))
        start = Segment(fill_template(form.input_template, prompt), is_target=False)
        return Draft([[start, answer] for answer in answers], margin)

    def _margin(self, row: Row) -> float:
        if not self._format.with_margin:
            return 0.0
        value = row[self._format.margin_key]
        number = number_of(value)
        if number is None or not math.isfinite(number):
            raise RowError(f"'{self._format.margin_key}' is {value!r}, not a number")
        return number

    def _chat_segments(self, row: Row, sides: Sequence[tuple[str, bool]]) -> list[list[Segment]]:
        """Return both sides, whose targets are the assistant's turns behind the messages that they
        share.
        """
        dialogues, tools = [self._dialogue(row, name) for name, _ in sides], row.get("tools")
        num_shared, segments = _num_shared(*(dialogue[:-1] for dialogue in dialogues)), []
        for messages, (_, is_cut) in zip(dialogues, sides, strict=True):
            if len(messages) == num_shared + 1:
                rendered = render_answer(self._encoder, messages, tools=tools)
            else:
                rendered = render_dialogue(self._encoder, messages, tools=tools)
                num_known = sum(message["role"] == "assistant" for message in messages[:num_shared])
                rendered = replace(rendered, assistant_spans=rendered.assistant_spans[num_known:])
            if is_cut:
                segments.append(cut_segments(self._encoder, rendered, messages[-1]))
            else:
                segments.append(cut_at_spans(rendered.text, rendered.assistant_spans))
        return segments

    def _dialogue(self, row: Row, name: str) -> list[Message]:
        """Return all messages of a side; what begins with no answer holds its prompt itself."""
        messages, prompt = (
            to_messages(self._response(row, name), text_role="assistant"),
            self._format.prompt_key,
        )
        if is_blank(messages[-1]):
            raise LeftOutError("empty response")
        is_answer = messages[0]["role"] == "assistant"
        return to_messages(row[prompt]) + messages if prompt and is_answer else messages

    def _refine(self, draft: Draft, tokens: list[Tokens]) -> list[Tokens]:
        """Sides without a prompt of their own part where their tokens do."""
        if any(len(segments) > 1 for segments in draft.sequences):
            return tokens
        num_shared = _num_shared(*(part.ids for part in tokens))
        return [
            Tokens(ids, [flag and i >= num_shared for i, flag in enumerate(mask)])
            for ids, mask in tokens
        ]

    def _reason_to_leave_out(self, tokens: list[Tokens]) -> str:
        chosen, rejected = tokens
        if chosen.ids == rejected.ids:
            return "chosen and rejected are the same" if self._format.drop_identical else ""
        return super()._reason_to_leave_out(tokens)


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
