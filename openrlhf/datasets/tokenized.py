"""From rows to examples of token ids, the same way for every kind of data.

Rows are rendered into segments, encoded many at a time, held against the length limit and counted,
by `datasets.Dataset.map`: in several processes where there are many rows, whose result is then kept
in the cache of the datasets library. What a row must hold is said by the subclasses.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import datasets
import torch
from datasets import Dataset, Features, List, Value
from filelock import FileLock
from torch import Tensor

from openrlhf.config.base import Base, Caution, is_given, with_default
from openrlhf.datasets.chat import (
    LeftOutError,
    RowError,
    Segment,
    has_placeholder,
    is_rendered,
    text_to_learn,
)
from openrlhf.datasets.conventions import image_notices
from openrlhf.datasets.problems import raise_bad_rows, row_place
from openrlhf.errors import ConfigError, DataError
from openrlhf.utils import tokenizer as tokenizer_module
from openrlhf.utils.tokenizer import TextEncoder, Tokenizer

BATCH_ROWS = 1000
CACHED_ROWS = 1000  # fewer are tokenised sooner than they are looked up
PARALLEL_ROWS = 10_000  # of fewer, two processes do no more than one that encodes on two cores
MAX_PROCESSES = 16
LOCK_S = 3600.0  # another rank of this machine may take so long to tokenise the same rows
Row = Mapping[str, Any]
Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

# What is kept of each row of the data set.
_FACTS = {
    "left_out": Value("string"),  # why the row is no example; "" for an example
    "problem": Value("string"),  # what is wrong with the row; "" for nothing
    "is_truncated": Value("bool"),
    "is_spelled": Value("bool"),  # its data spells special tokens
    "num_tokens": Value("int32"),  # of all sequences together
    "longest": Value("int32"),  # tokens of its longest sequence
    "largest_id": Value("int32"),
    "digest": Value("string"),  # a hash of the example
}
_FEATURES = Features(
    {
        "ids": List(List(Value("int32"))),  # one list a sequence: two for a pair
        "targets": List(List(Value("bool"))),
        "extra": Value("string"),  # JSON
        **_FACTS,
    }
)


@dataclass(frozen=True)
class RowFormat(ABC):
    """What every kind of row is read by."""

    input_template: str | None = None  # around a plain prompt
    apply_chat_template: bool | None = None  # None: where a column holds dialogues
    max_len: int | None = 2048  # tokens; None for no limit
    overlong: str = "filter"  # filter | truncate | truncate_left | error
    allow_special_tokens: bool = True  # those spelled in plain text are what they say

    @abstractmethod
    def check_columns(self, rows: Dataset) -> None:
        """Raise DataError that names each column that is not there; needs no tokenizer."""


@dataclass(frozen=True)
class ModelLimits:
    """The sizes of a model that reads the rows. An id beyond the embeddings ends deep in a kernel;
    a place beyond the positions was never trained, or does not exist.
    """

    path: str
    num_embeddings: int | None  # token ids are below it; None: not known
    num_positions: int | None  # tokens of the longest sequence; None: any number


class Tokens(NamedTuple):
    """One sequence of T tokens and which of them are targets."""

    ids: list[int]
    mask: list[bool]

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return ids, (T,) int64, and mask, (T,) bool."""
        return torch.tensor(self.ids, dtype=torch.int64), torch.tensor(self.mask, dtype=torch.bool)


@dataclass
class Draft:
    """A row on its way to an example: its segments, then its tokens, or why it is none."""

    sequences: list[list[Segment]] = field(default_factory=list)
    extra: Any = None  # JSON; what the example holds besides its sequences
    tokens: list[Tokens] = field(default_factory=list)
    left_out: str = ""
    problem: str = ""
    is_truncated: bool = False
    is_spelled: bool = False

    def columns(self) -> dict[str, object]:
        """Return the values of `_FEATURES`."""
        tokens = [] if self.left_out or self.problem else self.tokens
        ids, targets = [part.ids for part in tokens], [part.mask for part in tokens]
        extra = json.dumps(self.extra, default=str)
        return {
            "ids": ids,
            "targets": targets,
            "extra": extra,
            "left_out": self.left_out,
            "problem": self.problem,
            "is_truncated": self.is_truncated,
            "is_spelled": self.is_spelled,
            "num_tokens": sum(map(len, ids)),
            "longest": max(map(len, ids), default=0),
            "largest_id": max((max(part, default=0) for part in ids), default=0),
            "digest": hashlib.sha256(json.dumps([ids, targets, extra]).encode()).hexdigest(),
        }


FormatT = TypeVar("FormatT", bound=RowFormat)
ConfigT = TypeVar("ConfigT", bound=Base)


class TokenizedDataset(ABC, Generic[FormatT]):
    """Examples that have targets and fit the length limit, in file order; raises DataError."""

    subject: ClassVar[str] = "data set"
    flags: ClassVar[str] = "--max_len"  # what to check when no row is left

    def __init__(
        self,
        rows: Dataset,
        tokenizer: Tokenizer,
        row_format: FormatT,
    ) -> None:
        self.notices: list[str] = []  # what a person should be told, one line each
        self._rows = rows
        self._format = row_format
        self._encoder = TextEncoder(tokenizer, allow_special_tokens=row_format.allow_special_tokens)
        self._check_columns()
        template = row_format.input_template
        if template and not self._format.apply_chat_template and not has_placeholder(template):
            self.notices.append(
                Caution(f"--input_template {template!r} has no {{}} and is not used")
            )
        self.notices += image_notices(rows.column_names)
        self._table = self._tokenised()
        self._facts: dict[str, list] = self._table.select_columns(list(_FACTS))[:]
        problems = [
            f"{row_place(rows, row_id)}: {what}"
            for row_id, what in enumerate(self._facts["problem"])
            if what
        ]
        raise_bad_rows(self.subject, problems, "Repair the rows, or choose other columns.")
        reasons = self._facts["left_out"]
        self.dropped = Counter(filter(None, reasons))  # rows left out, by reason
        self.row_ids = [row for row, why in enumerate(reasons) if not why]  # of each example
        self._report()

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def num_truncated(self) -> int:
        """Return the number of rows cut at the length limit."""
        return sum(self._facts["is_truncated"])

    @property
    def lengths(self) -> Tensor:
        """Return the tokens of every example, all its sequences together, (len,) int64."""
        return self._fact("num_tokens")

    @property
    def fingerprint(self) -> str:
        """Return a hash of all examples, to notice on resume that the data changed."""
        digests = self._facts["digest"]
        return hashlib.sha256("".join(digests[row] for row in self.row_ids).encode()).hexdigest()

    def check_fits(self, limits: ModelLimits) -> None:
        """Raise DataError where a model of these sizes cannot read an example."""
        if not len(self):
            return
        problems = []
        ids, lengths = self._fact("largest_id"), self._fact("longest")
        if limits.num_embeddings is not None and int(ids.max()) >= limits.num_embeddings:
            first = int((ids >= limits.num_embeddings).int().argmax())
            problems.append(
                f"{self._place(first)} has token id {int(ids[first])}, and the model {limits.path} "
                f"has {limits.num_embeddings} embeddings. Use a model whose folder holds its own "
                "tokenizer, or give it embeddings for the tokens that were added."
            )
        if limits.num_positions is not None and int(lengths.max()) > limits.num_positions:
            longest = int(lengths.argmax())
            problems.append(
                f"{int((lengths > limits.num_positions).sum())} of {len(self._rows)} rows are "
                f"longer than the {limits.num_positions} positions of the model {limits.path}: "
                f"{self._place(longest)} has {int(lengths[longest])} tokens. Type --max_len "
                f"{limits.num_positions}, or set max_position_embeddings in its config.json if it "
                "can read more."
            )
        if problems:
            raise DataError(problems)

    @abstractmethod
    def _check_columns(self) -> None:
        """Find the columns, and say in the format how they are read; raise DataError when one is
        not there.
        """

    @property
    def recognised(self) -> dict[str, object]:
        """Return settings of the config, dotted, that say how the rows are read."""
        return {"data.apply_chat_template": bool(self._format.apply_chat_template)}

    @abstractmethod
    def _draft(self, row: Row) -> Draft:
        """Return the row's segments; raise RowError, or LeftOutError for nothing to learn."""

    def _is_rendered(self, row: Row, column: str) -> bool:
        """Return True for a prompt in this column that is not to be rendered again."""
        is_chat = bool(self._format.apply_chat_template)
        return is_rendered(row, row[column], self._encoder, apply_chat_template=is_chat)

    def _refine(self, draft: Draft, tokens: list[Tokens]) -> list[Tokens]:
        """Change whole sequences before they are cut; may raise RowError."""
        return tokens

    def _cut(self, draft: Draft, tokens: list[Tokens], limit: int) -> list[Tokens]:
        """Return the sequences of an over-long row cut at the limit."""
        return [Tokens(ids[:limit], mask[:limit]) for ids, mask in tokens]

    def _reason_to_leave_out(self, tokens: list[Tokens]) -> str:
        """Return why a cut example is of no use, or nothing."""
        return "" if all(any(part.mask) for part in tokens) else "nothing to learn"

    def _example(self, index: int) -> tuple[list[Tokens], Any]:
        """Return the sequences of an example, and what it holds besides them."""
        row = self._table[self.row_ids[index]]
        sequences = [Tokens(*pair) for pair in zip(row["ids"], row["targets"], strict=True)]
        return sequences, json.loads(row["extra"])

    def _fact(self, name: str) -> Tensor:
        values = self._facts[name]
        return torch.tensor([values[row] for row in self.row_ids], dtype=torch.int64)

    def _place(self, index: int) -> str:
        return row_place(self._rows, self.row_ids[index])

    def _tokenised(self) -> Dataset:
        """Return what becomes of every row; of the processes of a machine one makes it where it is
        kept.
        """
        rows, num_rows = self._rows, len(self._rows)
        is_parallel, is_kept = num_rows >= PARALLEL_ROWS, num_rows >= CACHED_ROWS
        folder = Path(datasets.config.HF_DATASETS_CACHE) / "openrlhf"
        key = self._cache_key() if is_kept else "not kept"
        if is_kept:
            folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{key}.lock", timeout=LOCK_S) if is_kept else nullcontext():
            return rows.map(
                self._tokenise,
                desc=f"tokenising {self.subject}",
                batched=True,
                batch_size=BATCH_ROWS,
                remove_columns=rows.column_names,
                features=_FEATURES,
                new_fingerprint=key,
                num_proc=min(num_cores(), MAX_PROCESSES) if is_parallel else None,
                keep_in_memory=not is_kept,
                cache_file_name=str(folder / f"{key}.arrow") if is_kept else None,
            )

    def _cache_key(self) -> str:
        """Return a hash of all that decides the result, this code included."""
        form, tokenizer = self._format, self._encoder.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        facts = [
            self._rows._fingerprint,
            f"{type(self).__qualname__} {form!r} {self._encoder.end_ids}",
            f"{type(tokenizer).__name__} {tokenizer.init_kwargs} {tokenizer.special_tokens_map}",
            tokenizer.chat_template,
            sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str(),
        ]
        digest = hashlib.sha256(repr(facts).encode())
        sources = [*Path(__file__).parent.glob("*.py"), Path(str(tokenizer_module.__file__))]
        for path in sorted(sources):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:32]  # with the mark of a process at most 64, says datasets

    def _tokenise(self, batch: Mapping[str, Sequence]) -> dict[str, list]:
        """Return what becomes of some rows, a list for each column of `_FEATURES`."""
        rows = zip(*batch.values(), strict=True)
        drafts = [self._drafted(dict(zip(batch, row, strict=True))) for row in rows]
        texts = [[part.text for part in seq] for draft in drafts for seq in draft.sequences]
        encoded = iter(self._encoder.encode_segments(texts))
        for draft in drafts:
            if draft.sequences:
                tokens = [self._assemble(parts, next(encoded)) for parts in draft.sequences]
                self._finish(draft, tokens)
        columns = [draft.columns() for draft in drafts]
        return {name: [row[name] for row in columns] for name in _FEATURES}

    def _drafted(self, row: Row) -> Draft:
        num_spelled = self._encoder.num_spelled
        try:
            draft = self._draft(row)
        except LeftOutError as reason:
            return Draft(left_out=str(reason))
        except RowError as error:
            return Draft(problem=str(error))
        draft.is_spelled = self._encoder.num_spelled > num_spelled
        return draft

    def _finish(self, draft: Draft, tokens: list[Tokens]) -> None:
        """Note the sequences cut at the limit, or why there are none."""
        try:
            tokens = self._refine(draft, tokens)
        except RowError as error:
            draft.problem = str(error)
            return
        limit, longest = self._format.max_len, max(len(part.ids) for part in tokens)
        if limit is not None and longest > limit:
            if self._format.overlong == "error":
                draft.problem = f"{longest} tokens, over the limit of {limit}"
                return
            if self._format.overlong == "filter":
                draft.left_out = "over-long"
                return
            draft.is_truncated = True
            tokens = self._cut(draft, tokens, limit)
        draft.tokens, draft.left_out = tokens, self._reason_to_leave_out(tokens)

    def _assemble(self, segments: list[Segment], ids: list[list[int]]) -> Tokens:
        """Join segments, between the tokenizer's own beginning and one EOS."""
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
        mask[:1] = [False]  # nothing predicts the first token
        return Tokens(with_leading, mask)

    def _end_ids(self) -> frozenset[int]:
        """Return ids after which no EOS is put: of a chat template any special token."""
        is_chat = self._format.apply_chat_template
        return self._encoder.special_ids if is_chat else frozenset((self._eos_id(),))

    def _eos_id(self) -> int:
        tokenizer = self._encoder.tokenizer
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"tokenizer {tokenizer.name_or_path} has no EOS token to end a response with. "
                "Set eos_token in its tokenizer_config.json."
            )
        return tokenizer.eos_token_id

    def _response(self, row: Row, column: str) -> Any:
        """Return a response without the EOS spelled at its end, which is put there anyway."""
        value, eos = row[column], self._encoder.tokenizer.eos_token
        if value is None:
            raise LeftOutError("empty response")
        return value.removesuffix(eos) if isinstance(value, str) and eos else value

    def _response_text(self, row: Row, column: str) -> str:
        return text_to_learn(self._response(row, column), column)

    def _report(self) -> None:
        num_rows = len(self._rows)
        self._report_spelled()
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

    def _report_spelled(self) -> None:
        """Say what control tokens that rows spell are read as."""
        if not (num_spelled := sum(self._facts["is_spelled"])):
            return
        form, how = self._format, "text"
        if form.allow_special_tokens and not form.apply_chat_template:
            how = "control tokens. --allow_special_tokens false reads them as text"
        told = f"{num_spelled} of {len(self._rows)} rows spell control tokens, which are read as"
        self.notices.append(f"{told} {how}")


def num_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def as_recognised(
    config: ConfigT, data: TokenizedDataset, held_out: TokenizedDataset | None = None
) -> ConfigT:
    """Return the config with what its data was recognised as.

    It stays as it is where evaluation reads other columns: no setting says both.
    """
    if held_out is not None and held_out.recognised != data.recognised:
        return config
    for path, value in data.recognised.items():
        config = with_default(config, path, value)
    return config


def undecided(config: Base, data: TokenizedDataset, held_out: TokenizedDataset | None) -> list[str]:
    """Return dotted settings that nobody typed and that evaluation reads otherwise: whoever reads
    the config again has to recognise them again.
    """
    if held_out is None or held_out.recognised == data.recognised:
        return []
    paths = data.recognised.keys() | held_out.recognised.keys()
    return sorted(path for path in paths if not is_given(config, path))
