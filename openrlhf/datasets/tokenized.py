"""From rows to examples of token ids, the same way for every kind of data.

A subclass says what a row must hold and tokenises one. Rows are tokenised, held against the length
limit and counted by `datasets.Dataset.map`: in several processes where there are many rows, whose
result is then kept in the cache of the datasets library.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import datasets
import torch
from datasets import Dataset, Features, List, Value
from filelock import FileLock
from torch import Tensor

from openrlhf.config.base import Base, Caution, is_given, with_default
from openrlhf.datasets.chat import (
    RENDERED,
    LeftOutError,
    Rendered,
    RowError,
    check_order,
    fill_template,
    frame_of,
    has_placeholder,
    is_blank,
    plain_text,
    render,
    text_to_learn,
    to_messages,
    without_answer,
)
from openrlhf.datasets.conventions import IMAGE_COLUMNS
from openrlhf.datasets.problems import raise_bad_rows, row_place
from openrlhf.errors import ConfigError, DataError
from openrlhf.utils import tokenizer as tokenizer_module
from openrlhf.utils.tokenizer import TextEncoder, Tokenizer

PARALLEL_ROWS = 10_000  # fewer are tokenised before processes have started
MAX_PROCESSES = 16
LOCK_S = 3600.0  # another rank of this machine may take so long to tokenise the same rows
DEFAULT_TEMPLATE = "User: {}\nAssistant: "
Row = Mapping[str, Any]
ConfigT = TypeVar("ConfigT", bound=Base)

# What is kept of each row of the data set, beside its example.
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
    def find_columns(self, rows: Dataset) -> Sequence[str | None]:
        """Return the columns that are read; raise DataError that names each that is not there."""


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


# The sequences of a row, and what its example holds besides them: JSON.
Tokenised: TypeAlias = tuple[list[Tokens], Any]


class TokenizedDataset(ABC):
    """Examples that have targets and fit the length limit, in file order; raises DataError."""

    subject: ClassVar[str] = "data set"
    flags: ClassVar[str] = "--max_len"  # what to check when no row is left

    def __init__(self, rows: Dataset, tokenizer: Tokenizer, row_format: RowFormat) -> None:
        self.notices: list[str] = []  # what a person should be told, one line each
        self.recognised: dict[str, object] = {}  # dotted settings that say how the rows are read
        self._rows = rows
        self._format: Any = row_format
        self._encoder = TextEncoder(tokenizer, allow_special_tokens=row_format.allow_special_tokens)
        self._find_columns()
        self._table = self._tokenised()
        self._facts: dict[str, list] = self._table.select_columns(list(_FACTS))[:]
        bad = [(row, what) for row, what in enumerate(self._facts["problem"]) if what]
        problems = [f"{row_place(rows, row)}: {what}" for row, what in bad]
        raise_bad_rows(self.subject, problems, "Repair the rows, or choose other columns.")
        reasons = self._facts["left_out"]
        self.dropped = Counter(filter(None, reasons))  # rows left out, by reason
        self.row_ids = [row for row, why in enumerate(reasons) if not why]  # of each example
        self.num_truncated = sum(self._facts["is_truncated"])  # rows cut at the length limit
        self._report()

    def __len__(self) -> int:
        return len(self.row_ids)

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
    def _find_columns(self) -> None:
        """Find the columns, and say in the format how they are read; raise DataError when one is
        not there.
        """

    @abstractmethod
    def _tokens_of(self, row: Row) -> Tokenised:
        """Tokenise a row; raise RowError, or LeftOutError for nothing to learn."""

    def _cut(self, tokens: list[Tokens], extra: Any, limit: int) -> Tokenised:
        """Return an over-long row cut at the limit."""
        return [Tokens(ids[:limit], mask[:limit]) for ids, mask in tokens], extra

    def _check_useful(self, tokens: list[Tokens]) -> None:
        """Raise LeftOutError for an example that is of no use."""
        if not all(any(part.mask) for part in tokens):
            raise LeftOutError("nothing to learn")

    def _say_read(
        self, columns: Sequence[str | None], how: str, *, is_asked: bool, fills_template: bool
    ) -> None:
        """Tell which columns are read and as what, unless that is what was asked for; and what has
        no effect: an input template where prompts are not put into it, images.
        """
        if not is_asked:
            names = " and ".join(f"'{column}'" for column in columns if column is not None)
            self.notices.append(f"{names} read as {how}")
        template = self._format.input_template
        if template not in (None, "", DEFAULT_TEMPLATE) and not fills_template:
            self.notices.append(Caution(f"--input_template {template!r} is not used for {how}"))
        elif template and not has_placeholder(template):
            self.notices.append(
                Caution(f"--input_template {template!r} has no {{}}: it is not used")
            )
        for name in set(IMAGE_COLUMNS) & set(self._rows.column_names):
            told = f"column '{name}' is not read: models that see images cannot be trained yet"
            self.notices.append(Caution(told))

    def _is_rendered(self, row: Row, column: str) -> bool:
        """Return True for a text that is a rendered prompt: the row says so, or it begins and ends
        as the chat template that is applied begins and ends one.
        """
        value = row[column]
        if not isinstance(value, str) or row.get(RENDERED):
            return isinstance(value, str)
        if not self._format.apply_chat_template:
            return False
        start, middle, _ = frame_of(self._encoder)
        return bool(middle.strip()) and value.startswith(start) and value.endswith(middle)

    def _prompt_text(self, row: Row, column: str) -> str:
        """Return the rendered prompt of a row, ready for the assistant to write.

        A trailing assistant turn is an answer, not part of the prompt, and is left out. A prompt
        that is rendered already stays as it is.
        """
        value, form = row[column], self._format
        if self._is_rendered(row, column):
            return plain_text(value, column)
        if not form.apply_chat_template:
            text = self._encoder.plain(plain_text(value, column))
            return fill_template(form.input_template, text)
        messages = without_answer(to_messages(value))
        if not messages or is_blank(messages[-1]):
            raise RowError(f"'{column}' is empty")
        check_order(messages)
        tools = row.get("tools")
        return render(self._encoder, messages, add_generation_prompt=True, tools=tools)

    def _answered(
        self, row: Row, prompt_column: str | None, column: str, *, is_cut: bool
    ) -> Rendered:
        """Return the prompt, if there is one, and the response of two columns of text. Behind a
        prompt that a chat template rendered, the response ends as the template ends one.
        """
        answer, encoder = text_to_learn(self._response(row, column), column), self._encoder
        prompt = self._prompt_text(row, prompt_column) if prompt_column else ""
        _, middle, end = frame_of(encoder)
        is_rendered = prompt_column is not None and self._is_rendered(row, prompt_column)
        if not (is_rendered and middle.strip() and middle in prompt):
            return Rendered.of(prompt, encoder.plain(answer), is_cut=is_cut)
        end = "" if is_cut else end
        has_end = bool(end.strip()) and encoder.says_nothing(end)
        return Rendered.of(prompt, encoder.hide(answer) + end, is_cut=is_cut or has_end)

    def _response(self, row: Row, column: str) -> Any:
        """Return a response without the EOS spelled at its end, which is put there anyway."""
        value, eos = row[column], self._encoder.tokenizer.eos_token
        if value is None:
            raise LeftOutError("empty response")
        return value.removesuffix(eos) if isinstance(value, str) and eos else value

    def _encode(self, rendered: Rendered) -> Tokens:
        """Return the tokens of a text between the tokenizer's own beginning and, where it ends with
        what is learnt, one EOS. Its pieces are encoded apart, as at inference.
        """
        pieces, encoder = rendered.pieces, self._encoder
        token_ids: list[int] = []
        mask: list[bool] = []
        [encoded] = encoder.encode_segments([[text for text, _ in pieces]])
        for (_, is_target), part in zip(pieces, encoded, strict=True):
            token_ids += part
            mask += [is_target] * len(part)
        if pieces and pieces[-1][1] and not rendered.is_cut:
            eos = encoder.tokenizer.eos_token_id
            if eos is None:
                raise ConfigError(
                    f"tokenizer {encoder.tokenizer.name_or_path} has no EOS token to end a "
                    "response with. Set eos_token in its tokenizer_config.json."
                )
            ends = encoder.special_ids if self._format.apply_chat_template else {eos}
            if not token_ids or token_ids[-1] not in ends:
                token_ids.append(eos)
                mask.append(True)
        with_leading = encoder.with_leading_ids(token_ids)
        mask = [False] * (len(with_leading) - len(token_ids)) + mask
        mask[:1] = [False]  # nothing predicts the first token
        return Tokens(with_leading, mask)

    def _example(self, index: int) -> Tokenised:
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
        rows, key = self._rows, self._cache_key()
        is_parallel = len(rows) >= PARALLEL_ROWS
        folder = Path(datasets.config.HF_DATASETS_CACHE) / "openrlhf"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{key}.lock", timeout=LOCK_S):
            return rows.map(
                self._tokenise,
                desc=f"tokenising {self.subject}",
                remove_columns=rows.column_names,
                features=_FEATURES,
                new_fingerprint=key,
                num_proc=min(os.cpu_count() or 1, MAX_PROCESSES) if is_parallel else None,
                cache_file_name=str(folder / f"{key}.arrow"),
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
        sources = [*Path(__file__).parent.glob("*.py"), Path(str(tokenizer_module.__file__))]
        facts += [path.read_bytes() for path in sorted(sources)]
        # With the mark of a process at most 64 characters, says datasets.
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]

    def _tokenise(self, row: Row) -> dict[str, object]:
        """Return what becomes of a row: the values of `_FEATURES`."""
        form, num_spelled = self._format, self._encoder.num_spelled
        tokens: list[Tokens] = []
        extra, left_out, problem, is_truncated = None, "", "", False
        try:
            tokens, extra = self._tokens_of(row)
            longest = max(len(part.ids) for part in tokens)
            if form.max_len is not None and longest > form.max_len:
                if form.overlong == "error":
                    raise RowError(f"{longest} tokens, over the limit of {form.max_len}")
                if form.overlong == "filter":
                    raise LeftOutError("over-long")
                is_truncated = True
                tokens, extra = self._cut(tokens, extra, form.max_len)
            self._check_useful(tokens)
        except LeftOutError as error:
            tokens, left_out = [], str(error)
        except RowError as error:
            tokens, problem = [], str(error)
        ids, targets = [part.ids for part in tokens], [part.mask for part in tokens]
        told = json.dumps(extra, default=str)
        return {
            "ids": ids,
            "targets": targets,
            "extra": told,
            "left_out": left_out,
            "problem": problem,
            "is_truncated": is_truncated,
            "is_spelled": self._encoder.num_spelled > num_spelled,
            "num_tokens": sum(map(len, ids)),
            "longest": max(map(len, ids), default=0),
            "largest_id": max((max(part, default=0) for part in ids), default=0),
            "digest": hashlib.sha256(json.dumps([ids, targets, told]).encode()).hexdigest(),
        }

    def _report(self) -> None:
        """Note how many rows were left out or cut, or spell control tokens; raise DataError if none
        is left.
        """
        num_rows, form = len(self._rows), self._format
        if num_spelled := sum(self._facts["is_spelled"]):
            how = "text"
            if form.allow_special_tokens and not form.apply_chat_template:
                how = "control tokens. --allow_special_tokens false reads them as text"
            told = f"{num_spelled} of {num_rows} rows spell control tokens, which are read as"
            self.notices.append(f"{told} {how}")
        for reason, count in sorted(self.dropped.items()):
            self.notices.append(Caution(f"{count} of {num_rows} rows were left out: {reason}"))
        if self.num_truncated:
            told = f"{self.num_truncated} of {num_rows} rows were cut at {form.max_len} tokens"
            self.notices.append(Caution(told))
        if not len(self):
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self.dropped.items())
            raise DataError(
                f"none of {num_rows} rows can be learned from ({reasons}). Check {self.flags}."
            )


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
