"""Supervised examples: token ids and the mask of tokens that are learned.

Prompt and response are tokenised apart, exactly as at inference, where the prompt's tokens are
fixed before the response begins. The mask covers the response and its end; with pretrain_mode every
token but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from datasets import Dataset
from torch import Tensor
from typing_extensions import Self

from openrlhf.config.base import Caution, is_given
from openrlhf.config.supervised import DatasetConfig
from openrlhf.datasets.chat import (
    LeftOutError,
    Message,
    Rendered,
    RowError,
    Segment,
    cut_at_spans,
    cut_segments,
    fill_template,
    is_blank,
    plain_text,
    render_answer,
    render_dialogue,
    render_prompt,
    rendered_segments,
    text_to_learn,
    to_messages,
)
from openrlhf.datasets.conventions import (
    PROMPT_COLUMNS,
    TEXT_COLUMNS,
    common_settings,
    count_rendered,
    holds_answers,
    holds_dialogues,
    if_given,
    pick_column,
    recognised_line,
    rendered_notices,
    uses_chat_template,
)
from openrlhf.datasets.problems import Gathered, missing_column
from openrlhf.datasets.tokenized import (
    Draft,
    Row,
    RowFormat,
    TokenizedDataset,
    Tokens,
)
from openrlhf.errors import ConfigError, DataError

LIKELY_ANSWERS = ("output", "response", "completion", "answer")  # columns that a remedy names
DEFAULT_TEMPLATE = "User: {}\nAssistant: "


class Columns(NamedTuple):
    """What is read of a row."""

    prompt: str
    answer: str | None  # None: the prompt's column holds the answer too


@dataclass(frozen=True)
class AnsweredFormat(RowFormat):
    """How rows become a prompt and its response."""

    input_key: str | None = None  # None: the first of PROMPT_COLUMNS with an answer
    output_key: str | None = None  # None: `usual_output`, `completion`, or the dialogue's last
    usual_output: str | None = None  # looked for where nobody names a column
    input_template: str | None = DEFAULT_TEMPLATE

    further_remedy: ClassVar[str] = ""  # for rows without a response column

    @classmethod
    def of(cls, data: DatasetConfig, **more: Any) -> Self:
        """As a command's `data.*` says; `more` are the fields of the kind of row."""
        return cls(
            input_key=if_given(data, "input_key"),
            output_key=if_given(data, "output_key"),
            usual_output=None if is_given(data, "output_key") else data.output_key,
            input_template=data.input_template,
            max_len=data.max_len,
            **common_settings(data, overlong=data.overlong_rows),
            **more,
        )

    def check_columns(self, rows: Dataset) -> None:
        self.find_columns(rows)

    def find_columns(self, rows: Dataset) -> Columns:
        """The columns that flags name, or else the first of the usual ones with an answer."""
        found = rows.column_names
        if self.output_key is not None and self.output_key not in found:
            gathered = Gathered()
            gathered.attempt(
                lambda: pick_column(self.input_key, found, PROMPT_COLUMNS, flag="--input_key")
            )
            gathered.attempt(lambda: pick_column(self.output_key, found, (), flag="--output_key"))
            gathered.raise_if_any()
        if self.input_key is None and self.output_key is None and holds_answers(found):
            return Columns("input", "output")
        if self.input_key is not None or self.output_key is not None:
            prompt = pick_column(self.input_key, found, PROMPT_COLUMNS, flag="--input_key")
            candidates = [prompt]
        else:
            candidates = [name for name in PROMPT_COLUMNS if name in found]
        for prompt in candidates:
            if (columns := self._with_answer(prompt, rows)) is not None:
                return columns
        prompt = pick_column(self.input_key, found, PROMPT_COLUMNS, flag="--input_key")
        self._check_template_finds_answers(prompt, rows)
        return Columns(prompt, None)

    def is_whole_text(self, columns: Columns, rows: Dataset) -> bool:
        """Whether every token of the prompt column is learnt, and nothing else."""
        return False

    def _with_answer(self, prompt: str, rows: Dataset) -> Columns | None:
        """A prompt column with where its answer is; None when there is none."""
        found = rows.column_names
        if self.output_key is not None:
            return Columns(prompt, pick_column(self.output_key, found, (), flag="--output_key"))
        if self.usual_output in found:
            return Columns(prompt, self.usual_output)
        if prompt == "prompt" and "completion" in found:
            return Columns(prompt, "completion")
        is_named = self.input_key is not None or prompt != "prompt"
        has_own = is_named and holds_dialogues(rows, prompt)
        if has_own or self.is_whole_text(Columns(prompt, None), rows):
            return Columns(prompt, None)
        return None

    def _check_template_finds_answers(self, prompt: str, rows: Dataset) -> None:
        """No column holds an answer: raises DataError unless the chat template may find one."""
        columns = rows.column_names
        if self.apply_chat_template and holds_dialogues(rows, prompt):
            return
        if self.usual_output is not None:
            raise missing_column(self.usual_output, columns, flag="--output_key")
        likely = next((name for name in LIKELY_ANSWERS if name in columns), None)
        remedy = "Name it with --output_key"
        if likely is not None:
            remedy = f"Type --input_key {prompt} --output_key {likely}"
        raise DataError(
            f"no response column is given; columns found: {', '.join(columns)}. "
            f"{remedy}{self.further_remedy}."
        )


@dataclass(frozen=True)
class SFTFormat(AnsweredFormat):
    """How rows become supervised examples."""

    multiturn: bool = False  # learn every assistant turn, not only the last
    pretrain_mode: bool | None = False  # learn every token; None: of a column `text`

    further_remedy: ClassVar[str] = ", or --pretrain_mode to learn every token"

    def find_columns(self, rows: Dataset) -> Columns:
        """The same, or the one column of plain text."""
        if not self.pretrain_mode:
            return super().find_columns(rows)
        found = rows.column_names
        return Columns(pick_column(self.input_key, found, TEXT_COLUMNS, flag="--input_key"), None)

    def is_whole_text(self, columns: Columns, rows: Dataset) -> bool:
        """Whether every token of the prompt column is learnt, and nothing else."""
        if self.pretrain_mode is not None:
            return self.pretrain_mode
        is_text = columns == ("text", None) and not holds_dialogues(rows, "text")
        return is_text and not self.apply_chat_template


@dataclass(frozen=True)
class SFTExample:
    """One sequence to learn from."""

    token_ids: Tensor  # (T,) int64
    loss_mask: Tensor  # (T,) bool, False on the first token (nothing predicts it)


AnsweredFormatT = TypeVar("AnsweredFormatT", bound=AnsweredFormat)


class AnsweredPrompts(TokenizedDataset[AnsweredFormatT], Generic[AnsweredFormatT]):
    """Rows of a prompt and its response, in two columns or in one dialogue."""

    flags = "--input_key, --output_key and --max_len"

    def _check_columns(self) -> None:
        asked = self._format
        columns = asked.find_columns(self._rows)
        names = [name for name in columns if name is not None]
        is_chat = not asked.is_whole_text(columns, self._rows) and uses_chat_template(
            asked.apply_chat_template, self._rows, names, self._encoder.tokenizer
        )
        self._columns = columns
        self._format = replace(
            asked, input_key=columns.prompt, output_key=columns.answer, apply_chat_template=is_chat
        )
        self._say_recognised(asked, columns)
        self.notices += rendered_notices(self._num_rendered(), len(self._rows))

    @property
    def input_column(self) -> str:
        """The column of the prompt, or of the dialogue."""
        return self._columns.prompt

    @property
    def output_column(self) -> str | None:
        """The response column; None when the dialogue holds the response itself."""
        return self._columns.answer

    @property
    def recognised(self) -> dict[str, object]:
        """Settings of the config, dotted, that say how the rows are read."""
        keys = {"data.input_key": self._columns.prompt, "data.output_key": self._columns.answer}
        return {**super().recognised, **keys}

    def _num_rendered(self) -> int:
        if self._columns.answer is None:
            return 0
        is_chat = bool(self._format.apply_chat_template)
        return count_rendered(
            self._rows, self._columns.prompt, self._encoder, apply_chat_template=is_chat
        )

    def _say_recognised(self, asked: AnsweredFormatT, columns: Columns) -> None:
        """One line when columns, template or text were not asked for as they are read."""
        is_text, template = asked.is_whole_text(columns, self._rows), asked.input_template
        is_found = is_text or (self._format.apply_chat_template and not asked.apply_chat_template)
        how = "text, of which every token is learnt" if is_text else "text"
        if self._format.apply_chat_template:
            how = "messages, with the chat template"
        elif template and not is_text and self._num_rendered() < len(self._rows):
            how = f"text, with --input_template {template!r}"
        named = {asked.input_key or "input", asked.output_key or asked.usual_output, None}
        if is_found or not named.issuperset(columns):
            self.notices.append(recognised_line(columns, how))
        if is_found and template not in (None, DEFAULT_TEMPLATE):
            self.notices.append(Caution(f"--input_template {template!r} is not used for {how}"))

    def asked(self, row: Row) -> Any:
        """The prompt of a row: messages, or text as the model reads it."""
        form, column = self._format, self._columns.prompt
        if form.apply_chat_template and not isinstance(row[column], str):
            return to_messages(row[column])
        text = render_prompt(
            row,
            input_key=column,
            input_template=form.input_template,
            apply_chat_template=bool(form.apply_chat_template),
            encoder=self._encoder,
        )
        return self._encoder.reveal(text)

    def _draft(self, row: Row) -> Draft:
        column, answer = self._columns
        if answer is not None and self._is_rendered(row, column):
            response = text_to_learn(self._response_text(row[answer]), answer)
            prompt = plain_text(row[column], column)
            return Draft([rendered_segments(self._encoder, prompt, response, is_cut=_is_cut(row))])
        if self._format.apply_chat_template:
            return Draft([self._chat_segments(row)])
        if answer is None:  # a dialogue that is not to be rendered
            raise RowError(f"'{column}' is a message list. Add --apply_chat_template")
        response = text_to_learn(self._response_text(row[answer]), answer)
        prompt = self._encoder.plain(plain_text(row[column], column))
        segments = [
            Segment(fill_template(self._format.input_template, prompt), is_target=False),
            Segment(self._encoder.plain(response), is_target=True, is_cut=_is_cut(row)),
        ]
        return Draft([segments])

    def _chat_segments(self, row: Row) -> list[Segment]:
        messages = to_messages(row[self._columns.prompt])
        if self._columns.answer is not None:
            response = self._response_text(row[self._columns.answer])
            messages += to_messages(response, text_role="assistant")
        answers = [m for m in messages if m["role"] == "assistant"]
        if not answers or is_blank(answers[-1]):
            raise LeftOutError("no assistant turn" if not answers else "empty response")
        rendered = self._render(messages, row.get("tools"))
        if _is_cut(row) and messages[-1]["role"] == "assistant":
            return cut_segments(self._encoder, rendered, messages[-1])
        return cut_at_spans(rendered.text, rendered.assistant_spans)

    def _render(self, messages: Sequence[Message], tools: object) -> Rendered:
        return render_answer(self._encoder, messages, tools=tools)


def _is_cut(row: Row) -> bool:
    """Whether `batch_inference` notes that the answer met its limit of tokens."""
    return row.get("finish_reason") == "length"


class SFTDataset(AnsweredPrompts[SFTFormat]):
    """Examples to imitate, in file order; raises DataError."""

    def __getitem__(self, index: int) -> SFTExample:
        [tokens], _ = self._example(index)
        return SFTExample(*tokens.tensors)

    def _check_format(self) -> None:
        super()._check_format()
        if self._format.multiturn and not self._format.apply_chat_template:
            raise ConfigError(
                "--multiturn finds turns in a chat template. Add --apply_chat_template."
            )

    @property
    def recognised(self) -> dict[str, object]:
        """Settings of the config, dotted, that say how the rows are read."""
        return {
            **super().recognised,
            "model.pretrain_mode_enable": self._format.pretrain_mode,
        }

    def _check_columns(self) -> None:
        super()._check_columns()
        is_text = self._format.is_whole_text(self._columns, self._rows)
        self._format = replace(self._format, pretrain_mode=is_text)

    def _draft(self, row: Row) -> Draft:
        if not self._format.pretrain_mode:
            return super()._draft(row)
        text = self._encoder.plain(text_to_learn(row[self._columns.prompt], self._columns.prompt))
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
