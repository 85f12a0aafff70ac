"""Supervised examples: token ids and the mask of tokens that are learned.

Prompt and response are tokenised apart, exactly as at inference, where the prompt's tokens are
fixed before the response begins. The mask covers the response and its end; with pretrain_mode every
token but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from datasets import Dataset
from torch import Tensor
from typing_extensions import Self

from openrlhf.config.base import Caution, is_given
from openrlhf.config.supervised import DatasetConfig
from openrlhf.datasets.chat import (
    RENDERED,
    LeftOutError,
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
    holds_answers,
    holds_dialogues,
    if_given,
    pick_column,
    pick_columns,
    recognised_line,
    uses_chat_template,
)
from openrlhf.datasets.problems import missing_column
from openrlhf.datasets.tokenized import Draft, Row, RowFormat, TokenizedDataset, Tokens
from openrlhf.errors import ConfigError, DataError

LIKELY_ANSWERS = ("output", "response", "completion", "answer")  # columns that a remedy names
DEFAULT_TEMPLATE = "User: {}\nAssistant: "
Columns = tuple[str, str | None]  # prompt, answer; None: the prompt's column holds the answer too


@dataclass(frozen=True)
class SFTFormat(RowFormat):
    """How rows become a prompt and its response."""

    input_key: str | None = None  # None: the first of PROMPT_COLUMNS with an answer
    output_key: str | None = None  # None: `usual_output`, `completion`, or the dialogue's last
    usual_output: str | None = None  # looked for where nobody names a column
    input_template: str | None = DEFAULT_TEMPLATE
    multiturn: bool = False  # learn every assistant turn, not only the last
    pretrain_mode: bool | None = False  # learn every token; None: of a column `text`

    further_remedy: ClassVar[str] = ", or --pretrain_mode to learn every token"

    @classmethod
    def of(cls, data: DatasetConfig, **more: Any) -> Self:
        """Return what a command's `data.*` says; `more` are fields that stand elsewhere."""
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
        """Return the columns that flags name, or else the first of the usual ones with an
        answer; raise DataError when they are not there.
        """
        found = rows.column_names
        if self.pretrain_mode:
            return pick_column(self.input_key, found, TEXT_COLUMNS, flag="--input_key"), None
        is_named = self.input_key is not None or self.output_key is not None
        if not is_named and holds_answers(found):
            return "input", "output"
        wanted: list[tuple[str | None, Sequence[str], str]] = [
            (self.input_key, PROMPT_COLUMNS, "--input_key")
        ]
        if self.output_key is not None:
            wanted.append((self.output_key, (), "--output_key"))
        first = pick_columns(found, *wanted)[0]
        candidates = [first] if is_named else [name for name in PROMPT_COLUMNS if name in found]
        for prompt in candidates:
            if (columns := self._with_answer(prompt, rows)) is not None:
                return columns
        self._check_template_finds_answers(first, rows)
        return first, None

    def is_whole_text(self, columns: Columns, rows: Dataset) -> bool:
        """Return True if every token of the prompt column is learnt, and nothing else."""
        if self.pretrain_mode is not None:
            return self.pretrain_mode
        is_text = columns == ("text", None) and not holds_dialogues(rows, "text")
        return is_text and not self.apply_chat_template

    def _with_answer(self, prompt: str, rows: Dataset) -> Columns | None:
        """Return a prompt column with where its answer is; None when there is none."""
        found = rows.column_names
        if self.output_key is not None:
            return prompt, self.output_key
        if self.usual_output in found:
            return prompt, self.usual_output
        if prompt == "prompt" and "completion" in found:
            return prompt, "completion"
        is_named = self.input_key is not None or prompt != "prompt"
        has_own = is_named and holds_dialogues(rows, prompt)
        return (prompt, None) if has_own or self.is_whole_text((prompt, None), rows) else None

    def _check_template_finds_answers(self, prompt: str, rows: Dataset) -> None:
        """Raise DataError unless the chat template may find an answer, which no column holds."""
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
class SFTExample:
    """One sequence to learn from."""

    token_ids: Tensor  # (T,) int64
    loss_mask: Tensor  # (T,) bool, False on the first token (nothing predicts it)


SFTFormatT = TypeVar("SFTFormatT", bound=SFTFormat)


class AnsweredPrompts(TokenizedDataset[SFTFormatT]):
    """Rows of a prompt and its response, in two columns or in one dialogue."""

    flags = "--input_key, --output_key and --max_len"

    def _check_columns(self) -> None:
        asked = self._format
        columns = asked.find_columns(self._rows)
        is_text = asked.is_whole_text(columns, self._rows)
        is_chat = not is_text and uses_chat_template(
            asked.apply_chat_template, self._rows, filter(None, columns), self._encoder.tokenizer
        )
        if asked.multiturn and not is_chat:
            raise ConfigError(
                "--multiturn finds turns in a chat template. Add --apply_chat_template."
            )
        self.input_column, self.output_column = columns
        self._format = replace(asked, apply_chat_template=is_chat, pretrain_mode=is_text)
        self._say_recognised(asked, columns)

    @property
    def recognised(self) -> dict[str, object]:
        keys = {"data.input_key": self.input_column, "data.output_key": self.output_column}
        return {**super().recognised, **keys}

    def _say_recognised(self, asked: SFTFormat, columns: Columns) -> None:
        """Note it when columns, template or text were not asked for as they are read."""
        is_text, is_chat = self._format.pretrain_mode, self._format.apply_chat_template
        is_found, template = (
            is_text or (is_chat and not asked.apply_chat_template),
            asked.input_template,
        )
        how = "text, of which every token is learnt" if is_text else "text"
        if is_chat:
            how = "messages, with the chat template"
        elif template and not is_text and RENDERED not in self._rows.column_names:
            how = f"text, with --input_template {template!r}"
        named = {asked.input_key or "input", asked.output_key or asked.usual_output, None}
        if is_found or not named.issuperset(columns):
            self.notices.append(recognised_line(columns, how))
        if is_found and template not in (None, DEFAULT_TEMPLATE):
            self.notices.append(Caution(f"--input_template {template!r} is not used for {how}"))

    def asked(self, row: Row) -> Any:
        """Return the prompt of a row: messages, or text as the model reads it."""
        form, column = self._format, self.input_column
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
        column, answer = self.input_column, self.output_column
        is_cut = row.get("finish_reason") == "length"  # says `batch_inference`
        if self._format.pretrain_mode:
            text = self._encoder.plain(text_to_learn(row[column], column))
            return Draft([[Segment(text, is_target=True)]])
        if answer is not None and self._is_rendered(row, column):
            response, prompt = self._response_text(row, answer), plain_text(row[column], column)
            return Draft([rendered_segments(self._encoder, prompt, response, is_cut=is_cut)])
        if self._format.apply_chat_template:
            return Draft([self._chat_segments(row, is_cut=is_cut)])
        if answer is None:  # a dialogue that is not to be rendered
            raise RowError(f"'{column}' is a message list. Add --apply_chat_template")
        response = self._response_text(row, answer)
        prompt = self._encoder.plain(plain_text(row[column], column))
        segments = [
            Segment(fill_template(self._format.input_template, prompt), is_target=False),
            Segment(self._encoder.plain(response), is_target=True, is_cut=is_cut),
        ]
        return Draft([segments])

    def _chat_segments(self, row: Row, *, is_cut: bool) -> list[Segment]:
        messages = to_messages(row[self.input_column])
        if self.output_column is not None:
            response = self._response(row, self.output_column)
            messages += to_messages(response, text_role="assistant")
        answers = [m for m in messages if m["role"] == "assistant"]
        if not answers or is_blank(answers[-1]):
            raise LeftOutError("no assistant turn" if not answers else "empty response")
        render = render_dialogue if self._format.multiturn else render_answer
        rendered = render(self._encoder, messages, tools=row.get("tools"))
        if is_cut and messages[-1]["role"] == "assistant":
            return cut_segments(self._encoder, rendered, messages[-1])
        return cut_at_spans(rendered.text, rendered.assistant_spans)

    def _assemble(self, segments: list[Segment], ids: list[list[int]]) -> Tokens:
        token_ids, mask = super()._assemble(segments, ids)
        if self._format.pretrain_mode:
            mask = [False, *[True] * (len(token_ids) - 1)]
        return Tokens(token_ids, mask)


class SFTDataset(AnsweredPrompts[SFTFormat]):
    """Examples to imitate, in file order; raises DataError."""

    def __getitem__(self, index: int) -> SFTExample:
        [tokens], _ = self._example(index)
        return SFTExample(*tokens.tensors)

    @property
    def recognised(self) -> dict[str, object]:
        return {**super().recognised, "model.pretrain_mode_enable": self._format.pretrain_mode}


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
