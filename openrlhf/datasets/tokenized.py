"""From rows to examples of token ids, the same way for every kind of supervised data.

Rows are rendered into segments, encoded many at a time, held against the length limit and counted,
in several processes where there are many of them. What a row must hold is said by the subclasses;
the result is kept in the token cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

from datasets import Dataset
from torch import Tensor

from openrlhf.config.notices import Caution
from openrlhf.datasets.chat import RowError, has_placeholder, is_rendered
from openrlhf.datasets.conventions import image_notices, unread_notices
from openrlhf.datasets.model_limits import ModelLimits, check_fits
from openrlhf.datasets.problems import Problems, row_place
from openrlhf.datasets.segments import LeftOutError, Segment
from openrlhf.datasets.token_cache import (
    MIN_ROWS,
    cache_key,
    load_tokens,
    only_filler,
    save_tokens,
)
from openrlhf.datasets.token_store import Json, TokenizedRows, TokenStore
from openrlhf.errors import ConfigError, DataError
from openrlhf.utils.forked import map_forked, num_cores
from openrlhf.utils.tokenizer import TextEncoder, Tokenizer

CHUNK_ROWS = 1000
PARALLEL_ROWS = 10_000  # of fewer, two processes do no more than one that encodes on two cores
MAX_PROCESSES = 16  # more than the one that collects their results can keep up with
OVERLONG_POLICIES = ("filter", "truncate", "error")
Progress = Callable[[int, int], None]  # rows done, rows in all
Row = Mapping[str, object]


@dataclass(frozen=True)
class RowFormat(ABC):
    """What every kind of row is read by."""

    input_template: str | None = None  # around a plain prompt
    apply_chat_template: bool | None = None  # None: where a column holds dialogues
    max_len: int = 2048  # tokens
    overlong: str = "filter"  # filter | truncate | error
    allow_special_tokens: bool = True  # those spelled in plain text are what they say

    @abstractmethod
    def check_columns(self, rows: Dataset) -> None:
        """Raise DataError that names each column that is not there; needs no tokenizer."""


@dataclass(frozen=True)
class Draft:
    """A row before it is tokenised: its sequences, and what its example holds besides them."""

    sequences: list[list[Segment]]
    extra: Json = None


class Tokens(NamedTuple):
    """One sequence of T tokens and which of them are targets."""

    ids: list[int]
    mask: list[bool]


FormatT = TypeVar("FormatT", bound=RowFormat)
ChunkT = TypeVar("ChunkT")


class TokenizedDataset(ABC, Generic[FormatT]):
    """Examples that have targets and fit the length limit, in file order; raises DataError."""

    num_sequences: ClassVar[int] = 1  # in an example
    flags: ClassVar[str] = "--max_len"  # what to check when no row is left

    def __init__(
        self,
        rows: Dataset,
        tokenizer: Tokenizer,
        row_format: FormatT,
        *,
        progress: Progress | None = None,
    ) -> None:
        self.notices: list[str] = []  # what a person should be told, one line each
        self._rows = rows
        self._format = row_format
        self._encoder = TextEncoder(tokenizer, allow_special_tokens=row_format.allow_special_tokens)
        self._check_columns()
        self._check_format()
        self.notices += image_notices(rows.column_names) + unread_notices(rows)
        self._content = self._fill(progress)
        self._report()

    def __len__(self) -> int:
        return len(self._content.row_ids)

    @property
    def row_ids(self) -> list[int]:
        """Row of each example in the data set."""
        return self._content.row_ids

    @property
    def dropped(self) -> Counter[str]:
        """Rows left out, by reason."""
        return self._content.dropped

    @property
    def num_dropped(self) -> int:
        """Rows left out, for whatever reason."""
        return self.dropped.total()

    @property
    def num_truncated(self) -> int:
        """Rows cut at the length limit."""
        return self._content.num_truncated

    @property
    def lengths(self) -> Tensor:
        """Token count of every example, all its sequences together, (len,) int64."""
        first, *others = [store.lengths for store in self._content.stores]
        return sum(others, start=first)

    @property
    def fingerprint(self) -> str:
        """A hash of all examples, to notice on resume that the data changed."""
        return self._content.fingerprint()

    def check_fits(self, limits: ModelLimits) -> None:
        """Raise DataError where a model of these sizes cannot read an example."""
        check_fits(self._content, self._rows, limits)

    @abstractmethod
    def _check_columns(self) -> None:
        """Find the columns, and say in the format how they are read; raises DataError when one is
        not there.
        """

    @property
    def recognised(self) -> dict[str, object]:
        """Settings of the config, dotted, that say how the rows are read."""
        return {"data.apply_chat_template": bool(self._format.apply_chat_template)}

    @abstractmethod
    def _draft(self, row: Row) -> Draft:
        """The row's segments; raises RowError, or LeftOutError for nothing to learn."""

    def _is_rendered(self, row: Row, column: str) -> bool:
        """Whether the prompt in this column is not to be rendered again."""
        is_chat = bool(self._format.apply_chat_template)
        return is_rendered(row, row[column], self._encoder, apply_chat_template=is_chat)

    def _refine(self, draft: Draft, sequences: list[Tokens]) -> list[Tokens]:
        """A last word on whole sequences, before they are cut; may raise RowError."""
        return sequences

    def _reason_to_leave_out(self, sequences: list[Tokens]) -> str | None:
        """Why a cut example is of no use, or None."""
        return None if all(any(tokens.mask) for tokens in sequences) else "nothing to learn"

    def _check_format(self) -> None:
        form = self._format
        if form.overlong not in OVERLONG_POLICIES:
            raise ConfigError(
                f"--overlong_rows {form.overlong} is unknown. Use {', '.join(OVERLONG_POLICIES)}."
            )
        if form.apply_chat_template:
            return
        if form.input_template and not has_placeholder(form.input_template):
            self.notices.append(
                Caution(f"--input_template {form.input_template!r} has no {{}} and is not used")
            )

    def _fill(self, progress: Progress | None) -> TokenizedRows:
        """The examples, from the cache where they are there."""
        return cached(
            self._rows,
            self._encoder.tokenizer,
            f"{type(self).__qualname__} {self._format!r} {self._encoder.end_ids}",
            lambda: self._build(progress),
            progress=progress,
            notices=self.notices,
        )

    def _build(self, progress: Progress | None) -> TokenizedRows:
        content, problems, num_rows = self._no_rows(), Problems(), len(self._rows)
        num_done = 0
        for part, found in map_chunks(self._build_chunk, num_rows):
            content.extend(part)
            problems.extend(found)
            num_done = min(num_done + CHUNK_ROWS, num_rows)
            if progress is not None:
                progress(num_done, num_rows)
        problems.raise_if_any("data set", "Repair the rows, or choose other columns.")
        return content

    def _build_chunk(self, start: int) -> tuple[TokenizedRows, Problems]:
        content, problems = self._no_rows(), Problems()
        stop = min(start + CHUNK_ROWS, len(self._rows))
        drafts = self._draft_chunk(start, stop, content, problems)
        self._encode_chunk(drafts, content, problems)
        return content, problems

    def _no_rows(self) -> TokenizedRows:
        return TokenizedRows([TokenStore() for _ in range(self.num_sequences)])

    def _draft_chunk(
        self, start: int, stop: int, content: TokenizedRows, problems: Problems
    ) -> dict[int, Draft]:
        chunk = self._rows[start:stop]
        drafts: dict[int, Draft] = {}
        for offset in range(stop - start):
            row = {name: values[offset] for name, values in chunk.items()}
            num_spelled = self._encoder.num_spelled
            try:
                drafts[start + offset] = self._draft(row)
                content.num_spelled += self._encoder.num_spelled > num_spelled
            except LeftOutError as reason:
                content.dropped[str(reason)] += 1
            except RowError as error:
                problems.add(row_place(self._rows, start + offset), str(error))
        return drafts

    def _encode_chunk(
        self, drafts: dict[int, Draft], content: TokenizedRows, problems: Problems
    ) -> None:
        texts = [
            [part.text for part in seq] for draft in drafts.values() for seq in draft.sequences
        ]
        encoded = iter(self._encoder.encode_segments(texts))
        for row_id, draft in drafts.items():
            sequences = [self._assemble(seq, next(encoded)) for seq in draft.sequences]
            try:
                self._add(row_id, draft, sequences, content)
            except RowError as error:
                problems.add(row_place(self._rows, row_id), str(error))

    def _add(
        self, row_id: int, draft: Draft, sequences: list[Tokens], content: TokenizedRows
    ) -> None:
        sequences = self._refine(draft, sequences)
        limit, longest = self._format.max_len, max(len(tokens.ids) for tokens in sequences)
        if longest > limit and self._format.overlong == "error":
            raise RowError(f"{longest} tokens, over the limit of {limit}")
        if longest > limit and self._format.overlong == "filter":
            content.dropped["over-long"] += 1
            return
        content.num_truncated += int(longest > limit)
        sequences = [Tokens(ids[:limit], mask[:limit]) for ids, mask in sequences]
        reason = self._reason_to_leave_out(sequences)
        if reason is not None:
            content.dropped[reason] += 1
            return
        content.row_ids.append(row_id)
        content.extras.append(draft.extra)
        for store, tokens in zip(content.stores, sequences, strict=True):
            store.append(tokens.ids, tokens.mask)

    def _assemble(self, segments: list[Segment], ids: list[list[int]]) -> Tokens:
        """The segments one behind the other, between the tokenizer's own beginning and one EOS."""
        token_ids: list[int] = []
        mask: list[bool] = []
        for segment, part in zip(segments, ids, strict=True):
            token_ids += part
            mask += [segment.is_target] * len(part)
        has_end = segments[-1].is_cut or (token_ids and token_ids[-1] in self._end_ids())
        if segments[-1].is_target and not has_end:
            token_ids.append(self._eos_id())
            mask.append(True)
        with_leading = self._encoder.with_leading_ids(token_ids)
        mask = [False] * (len(with_leading) - len(token_ids)) + mask
        mask[0] = False  # nothing predicts the first token
        return Tokens(with_leading, mask)

    def _end_ids(self) -> frozenset[int]:
        """Ids after which no EOS is put: any special token that a chat template ends with."""
        if self._format.apply_chat_template:
            return self._encoder.special_ids
        return frozenset((self._eos_id(),))

    def _eos_id(self) -> int:
        eos_id = self._encoder.tokenizer.eos_token_id
        if eos_id is None:
            raise ConfigError(
                f"tokenizer {self._encoder.tokenizer.name_or_path} has no EOS token to end a "
                "response with. "
                "Set eos_token in its tokenizer_config.json."
            )
        return eos_id

    def _response_text(self, value: object) -> object:
        """A response without the EOS spelled at its end, which is put there anyway."""
        if value is None:
            raise LeftOutError("empty response")
        eos = self._encoder.tokenizer.eos_token
        return value.removesuffix(eos) if isinstance(value, str) and eos else value

    def _report(self) -> None:
        num_rows = len(self._rows)
        is_text = not self._format.apply_chat_template and self._format.allow_special_tokens
        self.notices += spelled_notices(self._content.num_spelled, num_rows, are_read=is_text)
        for reason, count in sorted(self.dropped.items()):
            self.notices.append(Caution(f"{count} of {num_rows} rows were left out: {reason}"))
        if self.num_truncated:
            self.notices.append(
                Caution(
                    f"{self.num_truncated} of {num_rows} rows were cut at {self._format.max_len} "
                    "tokens"
                )
            )
        if not len(self):
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self.dropped.items())
            raise DataError(
                f"none of {num_rows} rows can be learned from ({reasons}). Check {self.flags}."
            )


def spelled_notices(num_spelled: int, num_rows: int, *, are_read: bool) -> list[str]:
    """A line where rows spell control tokens: what they are read as."""
    if not num_spelled:
        return []
    how = "control tokens. --allow_special_tokens false reads them as text" if are_read else "text"
    return [f"{num_spelled} of {num_rows} rows spell control tokens, which are read as {how}"]


def cached(
    rows: Dataset,
    tokenizer: Tokenizer,
    recipe: str,
    build: Callable[[], TokenizedRows],
    *,
    progress: Progress | None,
    notices: list[str],
) -> TokenizedRows:
    """What is made of the rows, from the cache where it is there; one rank of a machine builds it.

    `recipe` names all that decides the result besides rows and tokenizer; `notices` gain what a
    person should be told.
    """
    num_rows = len(rows)
    if num_rows < MIN_ROWS:
        return build()
    key = cache_key(rows, tokenizer, recipe)
    found = load_tokens(key)
    if found is None:
        with only_filler(key):
            found = load_tokens(key)  # another process may have made it meanwhile
            if found is None:
                return _keep(key, build(), notices)
    if progress is not None:
        progress(num_rows, num_rows)
    return found


def _keep(key: str, built: TokenizedRows, notices: list[str]) -> TokenizedRows:
    try:
        save_tokens(key, built)
    except OSError as error:
        notices.append(Caution(f"the tokenised rows are not kept for the next run: {error}"))
    return built


def map_chunks(build: Callable[[int], ChunkT], num_rows: int) -> Iterator[ChunkT]:
    """What is built of each chunk of rows, named by its first; in order."""
    num_processes = min(num_cores(), MAX_PROCESSES) if num_rows >= PARALLEL_ROWS else 1
    return map_forked(build, range(0, num_rows, CHUNK_ROWS), num_processes=num_processes)
