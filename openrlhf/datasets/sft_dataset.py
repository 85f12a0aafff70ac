"""Supervised examples: token ids and the mask of tokens that are learned.

Prompt and response are tokenised apart, exactly as at inference, where the prompt's tokens are
fixed before the response begins. The mask covers the response and its end; with pretrain_mode every
token but the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from datasets import Dataset
from torch import Tensor

from openrlhf.datasets.chat import (
    STANDARD_PROMPT_COLUMNS,
    Rendered,
    RowError,
    fill_template,
    has_placeholder,
    is_blank,
    pick_column,
    plain_text,
    render_answer,
    render_dialogue,
    to_messages,
)
from openrlhf.datasets.problems import Problems, missing_column
from openrlhf.datasets.token_store import TokenStore
from openrlhf.errors import ConfigError, DataError
from openrlhf.utils.tokenizer import TextEncoder, Tokenizer, chat_template_of

CHUNK_ROWS = 1000
OVERLONG_POLICIES = ("filter", "truncate", "error")
STANDARD_RESPONSE_COLUMNS = ("completion",)
Progress = Callable[[int, int], None]  # rows done, rows in all
Row = dict[str, object]


@dataclass(frozen=True)
class SFTFormat:
    """How rows become supervised examples."""

    input_key: str = "input"
    output_key: str | None = None
    input_template: str | None = "User: {}\nAssistant: "
    apply_chat_template: bool = False
    multiturn: bool = False  # learn every assistant turn, not only the last
    pretrain_mode: bool = False  # learn every token of the input column
    max_len: int = 2048  # tokens
    overlong: str = "filter"  # filter | truncate | error
    allow_special_tokens: bool = False  # special tokens spelled in the data keep their meaning


@dataclass(frozen=True)
class SFTExample:
    """One sequence to learn from."""

    token_ids: Tensor  # (T,) int64
    loss_mask: Tensor  # (T,) bool, False on the first token (nothing predicts it)


@dataclass(frozen=True)
class _Segment:
    """A piece of rendered text that is tokenised by itself."""

    text: str
    is_target: bool


class _NoTargetError(ValueError):
    """The row is well formed but has nothing to learn."""


class SFTDataset:
    """Examples that have targets and fit the length limit, in file order; raises DataError."""

    def __init__(
        self,
        rows: Dataset,
        tokenizer: Tokenizer,
        sft_format: SFTFormat,
        *,
        progress: Progress | None = None,
    ) -> None:
        self.notices: list[str] = []  # what a person should be told, one line each
        self.dropped: Counter[str] = Counter()  # rows left out, by reason
        self.num_truncated = 0
        self.row_ids: list[int] = []  # row of each example in the data set
        self._rows = rows
        self._format = sft_format
        self._encoder = TextEncoder(tokenizer, allow_special_tokens=sft_format.allow_special_tokens)
        self._tokens = TokenStore()
        self._input_key, self._output_key = self._check_columns()
        self._build(progress)
        self._report()

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> SFTExample:
        return SFTExample(self._tokens[index], self._tokens.mask(index))

    @property
    def num_dropped(self) -> int:
        """Rows left out, for whatever reason."""
        return self.dropped.total()

    @property
    def lengths(self) -> Tensor:
        """Token count of every example, (len,) int64."""
        return self._tokens.lengths

    @property
    def fingerprint(self) -> str:
        """A hash of all token ids and masks, to notice on resume that the data changed."""
        return self._tokens.fingerprint()

    def _check_columns(self) -> tuple[str, str | None]:
        form, columns = self._format, self._rows.column_names
        _check_format(form)
        if form.apply_chat_template:
            chat_template_of(self._encoder.tokenizer)
        elif form.input_template and not has_placeholder(form.input_template):
            self.notices.append(
                f"--input_template {form.input_template!r} has no {{}} and is not used"
            )
        input_key, notice = pick_column(form.input_key, columns, STANDARD_PROMPT_COLUMNS)
        if input_key is None:
            raise missing_column(form.input_key, columns, flag="--input_key")
        self.notices += [notice] if notice else []
        return input_key, None if form.pretrain_mode else self._pick_output(input_key)

    def _pick_output(self, input_key: str) -> str | None:
        """The response column; None when the dialogue holds the response itself."""
        form, columns = self._format, self._rows.column_names
        if form.output_key is not None:
            if form.output_key not in columns:
                raise missing_column(form.output_key, columns, flag="--output_key")
            return form.output_key
        name, _ = pick_column("completion", columns, STANDARD_RESPONSE_COLUMNS)
        if name is not None and input_key == "prompt":
            self.notices.append(
                "no --output_key was given; the standard column 'completion' is used"
            )
            return name
        if not form.apply_chat_template:
            raise DataError(
                f"no response column is given; columns found: {', '.join(columns)}. "
                "Name it with --output_key, or use --apply_chat_template for message lists, "
                "or --pretrain_mode to learn every token."
            )
        return None

    def _build(self, progress: Progress | None) -> None:
        problems = Problems()
        for start in range(0, len(self._rows), CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, len(self._rows))
            row_ids, segments = self._render_chunk(start, stop, problems)
            encoded = self._encoder.encode_segments([[s.text for s in row] for row in segments])
            for row_id, row, ids in zip(row_ids, segments, encoded, strict=True):
                self._add(row_id, row, ids, problems)
            if progress is not None:
                progress(stop, len(self._rows))
        problems.raise_if_any("training data set", "Repair the rows, or choose other columns.")

    def _render_chunk(
        self, start: int, stop: int, problems: Problems
    ) -> tuple[list[int], list[list[_Segment]]]:
        chunk = self._rows[start:stop]
        row_ids: list[int] = []
        segments: list[list[_Segment]] = []
        for offset in range(stop - start):
            row = {name: values[offset] for name, values in chunk.items()}
            try:
                segments.append(self._segments(row))
                row_ids.append(start + offset)
            except _NoTargetError as reason:
                self.dropped[str(reason)] += 1
            except RowError as error:
                problems.add(f"row {start + offset}", str(error))
        return row_ids, segments

    def _segments(self, row: Row) -> list[_Segment]:
        """What is tokenised apart, in order; raises RowError, or _NoTargetError for nothing to
        learn.
        """
        if self._format.pretrain_mode:
            return [
                _Segment(self._encoder.hide(_text_or_none(row[self._input_key])), is_target=True)
            ]
        if self._format.apply_chat_template:
            return self._chat_segments(row)
        assert self._output_key is not None, "_pick_output requires one without a chat template"
        response = _text_or_none(self._response(row))
        prompt = self._encoder.hide(plain_text(row[self._input_key], self._input_key))
        return [
            _Segment(fill_template(self._format.input_template, prompt), is_target=False),
            _Segment(self._encoder.hide(response), is_target=True),
        ]

    def _response(self, row: Row) -> object:
        """The response column; an EOS spelled at its end is the end that is put there anyway."""
        value = row[self._output_key]  # type: ignore[index]
        if value is None:
            raise _NoTargetError("empty response")
        eos = self._encoder.tokenizer.eos_token
        return value.removesuffix(eos) if isinstance(value, str) and eos else value

    def _chat_segments(self, row: Row) -> list[_Segment]:
        messages = to_messages(row[self._input_key])
        if self._output_key is not None:
            messages += to_messages(self._response(row), text_role="assistant")
        answers = [m for m in messages if m["role"] == "assistant"]
        if not answers or is_blank(answers[-1]):
            raise _NoTargetError("no assistant turn" if not answers else "empty response")
        rendered = (
            render_dialogue(self._encoder, messages, tools=row.get("tools"))
            if self._format.multiturn
            else render_answer(self._encoder, messages, tools=row.get("tools"))
        )
        return _cut_at_spans(rendered)

    def _add(
        self, row_id: int, segments: list[_Segment], ids: list[list[int]], problems: Problems
    ) -> None:
        token_ids, mask = self._assemble(segments, ids)
        limit = self._format.max_len
        if len(token_ids) > limit and self._format.overlong == "error":
            problems.add(f"row {row_id}", f"{len(token_ids)} tokens, over the limit of {limit}")
            return
        if len(token_ids) > limit and self._format.overlong == "filter":
            self.dropped["over-long"] += 1
            return
        self.num_truncated += int(len(token_ids) > limit)
        token_ids, mask = token_ids[:limit], mask[:limit]
        if not any(mask):
            self.dropped["nothing to learn"] += 1
            return
        self.row_ids.append(row_id)
        self._tokens.append(token_ids, mask)

    def _assemble(
        self, segments: list[_Segment], ids: list[list[int]]
    ) -> tuple[list[int], list[bool]]:
        token_ids = [token for segment in ids for token in segment]
        mask = [s.is_target for s, part in zip(segments, ids, strict=True) for _ in part]
        if segments[-1].is_target and not (token_ids and token_ids[-1] in self._end_ids()):
            token_ids.append(self._eos_id())
            mask.append(True)
        with_leading = self._encoder.with_leading_ids(token_ids)
        mask = [self._format.pretrain_mode] * (len(with_leading) - len(token_ids)) + mask
        mask[0] = False
        return with_leading, mask

    def _end_ids(self) -> frozenset[int]:
        """Ids after which no EOS is put: any special token that a chat template ends with."""
        is_templated = self._format.apply_chat_template and not self._format.pretrain_mode
        return self._encoder.special_ids if is_templated else frozenset((self._eos_id(),))

    def _eos_id(self) -> int:
        eos_id = self._encoder.tokenizer.eos_token_id
        if eos_id is None:
            raise ConfigError(
                f"tokenizer {self._encoder.tokenizer.name_or_path} has no EOS token to end a "
                "response with. "
                "Set eos_token in its tokenizer_config.json."
            )
        return eos_id

    def _report(self) -> None:
        num_rows = len(self._rows)
        for reason, count in sorted(self.dropped.items()):
            self.notices.append(f"{count} of {num_rows} rows were left out: {reason}")
        if self.num_truncated:
            self.notices.append(
                f"{self.num_truncated} of {num_rows} rows were cut at {self._format.max_len} tokens"
            )
        if not len(self):
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self.dropped.items())
            raise DataError(
                f"none of {num_rows} rows can be learned from ({reasons}). "
                "Check --input_key, --output_key and --max_len."
            )


def _check_format(form: SFTFormat) -> None:
    if form.overlong not in OVERLONG_POLICIES:
        raise ConfigError(
            f"--overlong_rows {form.overlong} is unknown. Use {', '.join(OVERLONG_POLICIES)}."
        )
    if form.multiturn and not form.apply_chat_template:
        raise ConfigError("--multiturn finds turns in a chat template. Add --apply_chat_template.")


def _text_or_none(value: object) -> str:
    """Text to learn from; a row without any has no target, another type is an error."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise _NoTargetError("empty response")
    if not isinstance(value, str):
        raise RowError(
            f"{type(value).__name__} instead of text. Message lists need --apply_chat_template"
        )
    return value


def _cut_at_spans(rendered: Rendered) -> list[_Segment]:
    """The rendered text in order, cut at assistant spans; white space behind the last span is left
    out.
    """
    segments: list[_Segment] = []
    position = 0
    for start, end in rendered.assistant_spans:
        segments.append(_Segment(rendered.text[position:start], is_target=False))
        segments.append(_Segment(rendered.text[start:end], is_target=True))
        position = end
    tail = rendered.text[position:]
    if tail.strip():
        segments.append(_Segment(tail, is_target=False))
    return [segment for segment in segments if segment.text]
