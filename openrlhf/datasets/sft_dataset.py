"""Supervised examples: token ids and the mask of tokens that are learned.

Prompt and response are tokenised apart, exactly as at inference, where the prompt's tokens are
fixed before the response begins. The mask covers the response and its end; with pretrain_mode every
token but the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor
from typing_extensions import Self

from openrlhf.config.supervised import AnsweredDataConfig
from openrlhf.datasets.chat import (
    STANDARD_PROMPT_COLUMNS,
    Message,
    Rendered,
    fill_template,
    is_blank,
    pick_column,
    plain_text,
    render_answer,
    render_dialogue,
    to_messages,
)
from openrlhf.datasets.problems import missing_column
from openrlhf.datasets.tokenized import (
    Draft,
    LeftOutError,
    Row,
    RowFormat,
    Segment,
    TokenizedDataset,
    Tokens,
    cut_at_spans,
    text_to_learn,
)
from openrlhf.errors import ConfigError, DataError

DIALOGUE_COLUMNS = ("messages", "conversations")  # standard columns that hold the answer too


@dataclass(frozen=True)
class AnsweredFormat(RowFormat):
    """How rows become a prompt and its response."""

    input_key: str = "input"
    output_key: str | None = None  # None: the last message of the input column's dialogue
    input_template: str | None = "User: {}\nAssistant: "

    @classmethod
    def of(cls, data: AnsweredDataConfig, **more: Any) -> Self:
        """As a command's `data.*` says; `more` are the fields of the kind of row."""
        return cls(
            input_key=data.input_key,
            output_key=data.output_key,
            input_template=data.input_template,
            apply_chat_template=data.apply_chat_template,
            max_len=data.max_len,
            overlong=data.overlong_rows,
            **more,
        )


@dataclass(frozen=True)
class SFTFormat(AnsweredFormat):
    """How rows become supervised examples."""

    multiturn: bool = False  # learn every assistant turn, not only the last
    pretrain_mode: bool = False  # learn every token of the input column


@dataclass(frozen=True)
class SFTExample:
    """One sequence to learn from."""

    token_ids: Tensor  # (T,) int64
    loss_mask: Tensor  # (T,) bool, False on the first token (nothing predicts it)


AnsweredFormatT = TypeVar("AnsweredFormatT", bound=AnsweredFormat)


class AnsweredPrompts(TokenizedDataset[AnsweredFormatT], Generic[AnsweredFormatT]):
    """Rows of a prompt and its response, in two columns or in one dialogue."""

    flags = "--input_key, --output_key and --max_len"
    further_remedy: ClassVar[str] = ""  # for rows without a response column

    def _check_columns(self) -> None:
        form, columns = self._format, self._rows.column_names
        input_key, notice = pick_column(form.input_key, columns, STANDARD_PROMPT_COLUMNS)
        if input_key is None:
            raise missing_column(form.input_key, columns, flag="--input_key")
        self.notices += [notice] if notice else []
        self._input_key = input_key
        self._output_key = self._pick_output(input_key)

    @property
    def output_column(self) -> str | None:
        """The response column; None when the dialogue holds the response itself."""
        return self._output_key

    def _pick_output(self, input_key: str) -> str | None:
        form, columns = self._format, self._rows.column_names
        if form.output_key in columns:
            return form.output_key
        has_own_answer = form.apply_chat_template and input_key in DIALOGUE_COLUMNS
        is_standard = has_own_answer or (input_key == "prompt" and "completion" in columns)
        # "output" is the default of some commands: then it need not be meant.
        if form.output_key is not None and not (form.output_key == "output" and is_standard):
            raise missing_column(form.output_key, columns, flag="--output_key")
        if input_key == "prompt" and "completion" in columns:
            self.notices.append("the answers are taken from the standard column 'completion'")
            return "completion"
        if not form.apply_chat_template:
            raise DataError(
                f"no response column is given; columns found: {', '.join(columns)}. "
                "Name it with --output_key, or use --apply_chat_template for message lists"
                f"{self.further_remedy}."
            )
        return None

    def _draft(self, row: Row) -> Draft:
        if self._format.apply_chat_template:
            return Draft([self._chat_segments(row)])
        assert self._output_key is not None, "_pick_output requires one without a chat template"
        response = text_to_learn(self._response_text(row[self._output_key]))
        prompt = self._encoder.hide(plain_text(row[self._input_key], self._input_key))
        segments = [
            Segment(fill_template(self._format.input_template, prompt), is_target=False),
            Segment(self._encoder.hide(response), is_target=True, is_cut=_is_cut(row)),
        ]
        return Draft([segments])

    def _chat_segments(self, row: Row) -> list[Segment]:
        messages = to_messages(row[self._input_key])
        if self._output_key is not None:
            response = self._response_text(row[self._output_key])
            messages += to_messages(response, text_role="assistant")
        answers = [m for m in messages if m["role"] == "assistant"]
        if not answers or is_blank(answers[-1]):
            raise LeftOutError("no assistant turn" if not answers else "empty response")
        rendered = self._render(messages, row.get("tools"))
        return cut_at_spans(rendered.text, rendered.assistant_spans)

    def _render(self, messages: Sequence[Message], tools: object) -> Rendered:
        return render_answer(self._encoder, messages, tools=tools)


def _is_cut(row: Row) -> bool:
    """Whether `batch_inference` notes that the answer met its limit of tokens."""
    return row.get("finish_reason") == "length"


class SFTDataset(AnsweredPrompts[SFTFormat]):
    """Examples to imitate, in file order; raises DataError."""

    further_remedy = ", or --pretrain_mode to learn every token"

    def __getitem__(self, index: int) -> SFTExample:
        [tokens] = self._content.stores
        return SFTExample(tokens[index], tokens.mask(index))

    def _check_format(self) -> None:
        super()._check_format()
        if self._format.multiturn and not self._format.apply_chat_template:
            raise ConfigError(
                "--multiturn finds turns in a chat template. Add --apply_chat_template."
            )

    def _pick_output(self, input_key: str) -> str | None:
        return None if self._format.pretrain_mode else super()._pick_output(input_key)

    def _draft(self, row: Row) -> Draft:
        if not self._format.pretrain_mode:
            return super()._draft(row)
        text = self._encoder.hide(text_to_learn(row[self._input_key]))
        return Draft([[Segment(text, is_target=True)]])

    def _render(self, messages: Sequence[Message], tools: object) -> Rendered:
        if self._format.multiturn:
            return render_dialogue(self._encoder, messages, tools=tools)
        return super()._render(messages, tools)

    def _assemble(self, segments: list[Segment], ids: list[list[int]]) -> Tokens:
        token_ids, mask = super()._assemble(segments, ids)
        if self._format.pretrain_mode:
            mask = [False, *[True] * (len(token_ids) - 1)]
        return Tokens(token_ids, mask)

    def _end_ids(self) -> frozenset[int]:
        return frozenset((self._eos_id(),)) if self._format.pretrain_mode else super()._end_ids()
