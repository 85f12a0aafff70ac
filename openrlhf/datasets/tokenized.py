"""From rows to examples of token ids, the same way for every kind of data.

A kind of data set finds its columns and tokenises a row. A flag that names a column always wins;
without one, columns are recognised by the names that Hugging Face uses. `a.b` names what is under
`b` in column `a`. What a row holds and nothing reads is said in one line. Rows are tokenised, held
against the length limit and counted by `datasets.Dataset.map`: in several processes where there are
many rows. The result is kept in the cache of the datasets library.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import datasets
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from filelock import FileLock
from torch import Tensor

from openrlhf.config.base import Caution
from openrlhf.datasets.chat import (
    RENDERED,
    LeftOutError,
    Message,
    Rendered,
    RowError,
    check_order,
    fill_template,
    frame_of,
    has_placeholder,
    history_messages,
    is_blank,
    plain_text,
    render,
    spelled_messages,
    to_messages,
    without_answer,
)
from openrlhf.datasets.loading import (
    ExactJson,
    beyond_limit,
    cache_error,
    damage_of,
    raise_bad_rows,
    row_folder,
    row_location,
    without_nulls,
)
from openrlhf.datasets.pictures import undecoded, values_in, values_of, with_placeholders
from openrlhf.errors import ConfigError, DataError
from openrlhf.utils import images as images_module
from openrlhf.utils import tokenizer as tokenizer_module
from openrlhf.utils import vision_families
from openrlhf.utils.console import say_notices
from openrlhf.utils.images import ImageProcessor, Picture, PictureError, file_of, read_picture
from openrlhf.utils.tokenizer import TextEncoder, Tokenizer, chat_template_of

PROMPT_COLUMNS = ("input", "prompt", "messages", "conversations", "text", "instruction")
TEXT_COLUMNS = ("text", "input", "prompt")  # to be learnt as a whole
PARALLEL_ROWS = 10_000  # fewer are tokenised before processes have started
MAX_PROCESSES = 16
LOCK_S = 3600.0  # another rank of this machine may take so long to tokenise the same rows
REMEDY = "Repair the rows, choose other columns, or type --bad_rows skip to leave these out."
DEFAULT_TEMPLATE = "User: {}\nAssistant: "
Row = Mapping[str, Any]

# Columns with a fixed meaning, read besides those that flags name: of dialogues, and of rows.
DIALOGUE_COLUMNS = ("system", "history", "tools", "chat_template_kwargs")
ROW_COLUMNS = ("id", RENDERED, "finish_reason", "chosen_finish_reason", "rejected_finish_reason")
IMAGE_COLUMNS = ("images", "image")
OTHER_MEDIA = ("videos", "video", "audios", "audio")

# Columns that are kept of each row of the data set, besides its example.
_PER_ROW = {
    "left_out": Value("string"),  # why the row is no example; "" for an example
    "problem": Value("string"),  # what is wrong with the row; "" for nothing
    "is_truncated": Value("bool"),
    "is_spelled": Value("bool"),  # its data spells special tokens
    "unread": Value("string"),  # names of what is left out of its dialogues, each a line
    "num_tokens": Value("int32"),  # of all sequences together
    "longest": Value("int32"),  # tokens of its longest sequence
    "largest_id": Value("int32"),
    "num_image_tokens": Value("int32"),  # of all sequences together
    "digest": Value("string"),  # a hash of the example
}
_FEATURES = Features(
    {
        "ids": List(List(Value("int32"))),  # one list a sequence: two for a pair
        "targets": List(List(Value("bool"))),
        "extra": Value("string"),  # JSON
        "images": List(Value("string")),  # SHA-256 of each picture
        **_PER_ROW,
    }
)


@dataclass(frozen=True)
class RowFormat:
    """Settings for reading rows; each kind of data set uses its own fields of these.

    Example: `RowFormat("question", "answer", max_len=4096, overlong="truncate")`
    """

    input_key: str | None = None  # None: the first usual column that is there; so for each key
    output_key: str | None = None  # None: `usual_output`, `completion`, or the dialogue's last
    usual_output: str | None = None  # looked for where nobody names a response column
    label_key: str | None = None
    prompt_key: str | None = None
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    input_template: str | None = None  # around a plain prompt
    around: str | None = None  # text around what is asked, with {input}, as `wrap_input` puts it
    apply_chat_template: bool | None = None  # None: where a column holds dialogues
    image_key: str | None = None  # None: `images` or `image`
    max_images_per_prompt: int | None = None  # pictures of a row; None: as many as it has
    text_flag: str = "--input_key"  # names a column that is learnt as a whole
    multiturn: bool = False  # learn every assistant turn, not only the last
    pretrain_mode: bool | None = False  # learn every token; None: of a column `text`
    with_margin: bool = False  # read `margin`: how much better the chosen side is
    placeholder_token: str = ""  # ends a step
    reward_tokens: tuple[str, ...] = ()  # what a label of a step may be, the positive one first
    max_len: int | None = 2048  # tokens; None for no limit
    overlong: str = "filter"  # filter | truncate | truncate_left | error
    bad_rows: str = "fail"  # fail | skip
    has_agents: bool = False  # whose server renders what clients send, with a row's variables
    allow_special_tokens: bool = True  # those spelled in plain text are what they say

    @property
    def named_columns(self) -> list[str]:
        """Return the columns that somebody named, or that go by a default name."""
        keys = (self.input_key, self.output_key, self.label_key, self.prompt_key, self.image_key)
        return [name for name in (*keys, self.chosen_key, self.rejected_key) if name]


class Tokens(NamedTuple):
    """One sequence of T tokens and which of them are targets.

    Example: `Tokens([7, 8, 9, 2], [False, False, True, True])`: [9, 2] is learnt after [7, 8].
    """

    ids: list[int]
    mask: list[bool]


# The sequences of a row, and what its example holds besides them: JSON.
Tokenised: TypeAlias = tuple[list[Tokens], Any]


class TokenizedDataset(ABC):
    """Examples that have targets and fit the length limit, in file order; raises DataError."""

    subject: ClassVar[str] = "data set"
    flags: str = "--max_len"  # what to check when no row is left

    def __init__(
        self,
        rows: Dataset,
        tokenizer: Tokenizer,
        row_format: RowFormat,
        image_processor: ImageProcessor | None = None,  # of a model that reads pictures
    ) -> None:
        self.notices: list[str] = []  # what a person should be told, one line each
        self._format = row_format
        self._processor = image_processor
        self._reads_images = image_processor is not None and row_format.max_images_per_prompt != 0
        self._image_keys = self._find_images(rows) if self._reads_images else []
        self._rows = reduce(undecoded, rows.column_names, rows)
        self._encoder = TextEncoder(tokenizer, allow_special_tokens=row_format.allow_special_tokens)
        self._columns = self.find_columns(row_format, rows)
        self._nested = columns_of(rows, row_format)[len(rows.column_names) :]
        # Alpaca's question stands in two columns.
        is_named = (row_format.input_key or row_format.prompt_key) is not None
        is_joined = not is_named and "input" in rows.column_names
        self._joined = "input" if is_joined and self._columns[0] == "instruction" else None
        self._settle()
        self._table = self._tokenised()
        self._per_row: dict[str, list] = self._table.select_columns(list(_PER_ROW))[:]
        self.bad_rows = [(row, what) for row, what in enumerate(self._per_row["problem"]) if what]
        if row_format.bad_rows == "fail":
            problems = [f"{row_location(rows, row)}: {what}" for row, what in self.bad_rows]
            raise_bad_rows(self.subject, problems, REMEDY)
        reasons = self._per_row["left_out"]
        for row, _ in self.bad_rows:
            reasons[row] = "bad"
        self.dropped = Counter(filter(None, reasons))  # rows left out, by reason
        self.row_ids = [row for row, why in enumerate(reasons) if not why]  # of each example
        self.num_truncated = sum(self._per_row["is_truncated"])  # rows cut at the length limit
        self._report()

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def lengths(self) -> Tensor:
        """Return the tokens of every example, all its sequences together, (len,) int64."""
        return self._fact("num_tokens")

    @property
    def costs(self) -> Tensor:
        """Return the work of every example in tokens, (len,) int64: those of pictures count twice,
        for the tower computes them too.
        """
        return self.lengths + self._fact("num_image_tokens")

    def images(self, index: int) -> tuple[Picture, ...]:
        """Return the pictures of an example; raise DataError if they changed since the start."""
        row_id = self.row_ids[index]
        if not self._per_row["num_image_tokens"][row_id]:
            return ()
        expected = self._table[row_id]["images"]
        try:
            found = self._pictures(self.read(self._rows[row_id]), row_id)
        except RowError:
            found = ()
        if [picture.sha256 for picture in found] != expected:
            where = self.row_location(row_id)
            raise DataError(f"{where}: its images changed after they were read. Start again.")
        return found

    def location(self, index: int) -> str:
        """Return the file and row of an example: `rows.jsonl: row 3`."""
        return self.row_location(self.row_ids[index])

    def row_location(self, row_id: int) -> str:
        """Return the file and number of a row, whether it became an example or not."""
        return row_location(self._rows, row_id)

    def sequences(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Return the sequences of an example, each ids (T,) int64 and its targets (T,) bool."""
        return self._example(index)[0]

    def picture_notes(self, index: int) -> list[str]:
        """Return size and tokens of each picture of an example, a line each."""
        processor, lines = self._processor, []
        for number, picture in enumerate(self.images(index) if processor else (), start=1):
            size, count = f"{picture.width}x{picture.height}", processor.num_tokens(picture)
            lines.append(f"image {number}: {size} pixels, {count} token{'s' * (count > 1)}")
        return lines

    def is_placeholder(self, ids_T: Tensor) -> Tensor:
        """Return True at the tokens that stand for pixels, (T,) bool."""
        pad = None if self._processor is None else self._processor.image_token_id
        return torch.zeros_like(ids_T, dtype=torch.bool) if pad is None else ids_T == pad

    @property
    def fingerprint(self) -> str:
        """Return a hash of all examples, to notice on resume that the data changed."""
        digests = self._per_row["digest"]
        return hashlib.sha256("".join(digests[row] for row in self.row_ids).encode()).hexdigest()

    def check_fits(
        self, model: str, *, num_embeddings: int | None, num_positions: int | None
    ) -> None:
        """Raise DataError where a model of these sizes cannot read an example: an id beyond the
        embeddings ends deep in a kernel, a position beyond them was never trained. None: not
        known, or no limit.
        """
        if not len(self):
            return
        problems = []
        ids, lengths = self._fact("largest_id"), self._fact("longest")
        if num_embeddings is not None and int(ids.max()) >= num_embeddings:
            first = int((ids >= num_embeddings).int().argmax())
            where = row_location(self._rows, self.row_ids[first])
            problems.append(
                f"{where} has token id {int(ids[first])}, and the model {model} "
                f"has {num_embeddings} embeddings. Use a model whose folder holds its own "
                "tokenizer, or give it embeddings for the tokens that were added."
            )
        if num_positions is not None and int(lengths.max()) > num_positions:
            longest = int(lengths.argmax())
            where = row_location(self._rows, self.row_ids[longest])
            problems.append(
                f"{int((lengths > num_positions).sum())} of {len(self._rows)} rows are longer than "
                f"the {num_positions} positions of the model {model}: {where} has "
                f"{int(lengths[longest])} tokens. Type --max_len {num_positions}, or set "
                "max_position_embeddings in its config.json if it can read more."
            )
        if problems:
            raise DataError(problems)

    @classmethod
    @abstractmethod
    def find_columns(cls, form: RowFormat, rows: Dataset) -> Sequence[str | None]:
        """Return the columns that are read; raise DataError that names each that is not there."""

    @abstractmethod
    def _settle(self) -> None:
        """Decide what the format leaves open, and say how the rows are read."""

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

    @property
    def template_notices(self) -> list[str]:
        """Return a line if a flag would put these texts into the model's chat template."""
        form = self._format
        is_text = form.apply_chat_template is False and not form.pretrain_mode
        if not (is_text and self._encoder.tokenizer.chat_template):
            return []
        return [
            "the model has a chat template, and these texts are not put into it; "
            "--apply_chat_template does that"
        ]

    def _uses_chat_template(self, columns: Iterable[str | None]) -> bool:
        """Return True if the chat template renders the rows: as the flag says, or else where a
        column holds dialogues. Raise ConfigError when there is no template.
        """
        is_chat = self._format.apply_chat_template
        if is_chat is None:
            is_chat = bool(self._image_keys) or any(
                holds_dialogues(self._rows, name) for name in columns if name
            )
        if is_chat:
            has_tools = "tools" in self._rows.column_names
            chat_template_of(self._encoder.tokenizer, for_tools=has_tools)
        return is_chat

    def _words_of_chat(self, columns: Iterable[str | None]) -> str:
        """Return the notice about columns that the chat template renders."""
        is_dialogue = any(holds_dialogues(self._rows, name) for name in columns if name)
        return (
            "messages, with the chat template"
            if is_dialogue
            else "text, put into the chat template"
        )

    def _say_read(
        self, columns: Sequence[str | None], how: str, *, fills_template: bool = False
    ) -> None:
        """Tell which columns are read and as what, and what has no effect: an input template where
        prompts are not put into it, images.
        """
        template = self._format.input_template
        if template and fills_template:
            if not has_placeholder(template):
                told = f"--input_template {template!r} has no {{}}: it is not used"
                self.notices.append(Caution(told))
            else:
                how = f"{how}, with --input_template {template!r}"
                if "\\n" in template:
                    told = (
                        "holds a backslash before n, not a line break, which is $'\\n' in a shell"
                    )
                    self.notices.append(Caution(f"--input_template {template!r} {told}"))
        elif template not in (None, "", DEFAULT_TEMPLATE):
            self.notices.append(Caution(f"--input_template {template!r} is not used for {how}"))
        beside = DIALOGUE_COLUMNS if self._format.apply_chat_template else ()
        read = [columns[0], self._joined, *columns[1:], *beside]
        names = [name for name in read if name in (*self._rows.column_names, *self._nested)]
        named = " and ".join(map(repr, self._image_keys))
        pictures = f", with the images of {named}" if named else ""
        self.notices.insert(0, f"{' and '.join(map(repr, names))} read as {how}{pictures}")
        self._unread = self._unread_columns({*names, *ROW_COLUMNS, *self._image_keys})

    def _unread_columns(self, read: set[str]) -> list[str]:
        """Return the columns that are not read, in their order."""
        heads = dict.fromkeys(name.partition(".")[0] for name in self._nested)
        names = [*self._rows.column_names, *(name for head in heads for name in self._within(head))]
        parents = [n for n in names if any(name.startswith(f"{n}.") for name in self._nested)]
        return [name for name in names if name not in read.union(parents)]

    def _within(self, head: str) -> list[str]:
        """Return the names of what the first value of a column holds."""
        first = next((value for value in self._rows[head] if value), None)
        return [f"{head}.{key}" for key in first] if isinstance(first, Mapping) else []

    def _completed(self, row: Row) -> dict[str, Any]:
        found = dict(row)
        for name in self._nested:
            found[name] = value_at(row, name)
        if self._joined and row[self._joined] and isinstance(row["instruction"], str):
            found["instruction"] = f"{row['instruction']}\n{row[self._joined]}"
        return found

    def read(self, row: Row) -> dict[str, Any]:
        """Return a completed row with message lists in place of the texts that spell them, without
        keys that its table filled in; raise RowError.
        """
        found, form = self._completed(row), self._format
        more = {"history"} if form.apply_chat_template else set()
        named = () if form.pretrain_mode else {*self._columns, *more} - {None, form.label_key}
        for name in {*named, *DIALOGUE_COLUMNS} & found.keys():
            if not isinstance(self._feature(name), (datasets.Json, ExactJson)):
                found[name] = without_nulls(found[name])
        there = found.keys() & named
        return {**found, **{name: spelled_messages(found[name]) for name in there}}

    def _feature(self, name: str) -> object:
        features = self._rows.features
        return features.get(name) or features.get(name.partition(".")[0])

    def row(self, row_id: int) -> dict[str, Any]:
        """Return a row with what stands in several columns, or within one, under one name."""
        return self._completed(self._rows[row_id])

    def source(self, row_id: int) -> Any:
        """Return a row, or the text of the damaged record in its place."""
        damage = damage_of(self._rows, row_id)
        return damage[2] if damage else self.row(row_id)

    def _messages(
        self, row: Row, column: str, *, text_role: str = "user", begins: bool = True
    ) -> list[Message]:
        """Return the messages of a column and, where they begin a dialogue, those of the columns
        `system` and `history` before them.
        """
        reads_pictures, unread = self._reads_images, self._encoder.unread
        read = partial(to_messages, unread=unread, reads_pictures=reads_pictures)
        found = read(row[column], text_role=text_role)
        system, history = row.get("system"), row.get("history")
        if begins and history:
            found = history_messages(history, reads_pictures=reads_pictures) + found
        if begins and system:
            given = read([{"role": "system", "content": system}])
            if found[0]["role"] not in ("system", "developer"):
                found = given + found
            elif found[0]["content"] != given[0]["content"]:
                unread.add("'system' of rows with a system message")
        if self._image_keys:
            found = with_placeholders(found, len(self._own_images(row)), begins=begins)
        return found

    def turn_columns(self, row: Row) -> list[str]:
        """Return the columns of a row that was read whose turns stand before its dialogue: `system`
        gives way to a system message.
        """
        column = next(name for name in self._columns if name)
        if not self._format.apply_chat_template or self._is_rendered(row, column):
            return []
        first, *_ = self._messages({**row, "system": None}, column)
        return ["system", "history"][first["role"] in ("system", "developer") :]

    def _told(self, row: Row) -> dict[str, Any]:
        """Return the arguments of the chat template in a row, messages apart."""
        return {"tools": row.get("tools"), "variables": row.get("chat_template_kwargs")}

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
        found = self._messages(row, column)
        messages = without_answer(found)
        if len(messages) < len(found):
            self._encoder.unread.add("answers at the end of prompts")
        if not messages or is_blank(messages[-1]):
            raise RowError(f"'{column}' is empty")
        check_order(messages)
        return render(self._encoder, messages, add_generation_prompt=True, **self._told(row))

    def _answered(
        self, row: Row, prompt_column: str | None, column: str, *, is_cut: bool
    ) -> Rendered:
        """Return the prompt, if there is one, and the response of two columns of text. Behind a
        prompt that a chat template rendered, the response ends as the template ends one.
        """
        answer, encoder = plain_text(self._response(row, column), column), self._encoder
        prompt = self._prompt_text(row, prompt_column) if prompt_column else ""
        _, middle, end = frame_of(encoder)
        is_rendered = prompt_column is not None and self._is_rendered(row, prompt_column)
        if is_rendered and middle.strip() and middle in prompt:
            end = "" if is_cut else end
            text = prompt + encoder.hide(answer) + end
            is_cut = is_cut or (bool(end.strip()) and encoder.says_nothing(end))
        else:
            text = prompt + encoder.plain(answer)
        return Rendered(text, ((len(prompt), len(text)),), is_cut)

    def _response(self, row: Row, column: str) -> Any:
        """Return a response without the EOS spelled at its end, which is put there anyway; raise
        LeftOutError if it is empty.
        """
        value, eos = row[column], self._encoder.tokenizer.eos_token
        names = [name for name in self._columns if name]
        if all(row[name] is None for name in names):  # of a data set with other columns
            raise LeftOutError(f"no {' and no '.join(map(repr, names))}")
        if value is None or (isinstance(value, str) and not value.strip()):
            raise LeftOutError("empty response")
        if isinstance(value, str) and eos and value.rstrip().endswith(eos):
            return value.rstrip().removesuffix(eos)
        return value

    def _encode(self, rendered: Rendered) -> Tokens:
        """Return the tokens of a text between the tokenizer's own beginning and, where it ends with
        what is learnt, one EOS. Its pieces are encoded apart, as at inference.
        """
        pieces, encoder = rendered.pieces, self._encoder
        token_ids: list[int] = []
        mask: list[bool] = []
        encoded = encoder.encode_segments([text for text, _ in pieces])
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

    def _example(self, index: int) -> tuple[list[tuple[Tensor, Tensor]], Any]:
        """Return the sequences of an example, ids (T,) int64 and mask (T,) bool, and what it holds
        besides them.
        """
        row = self._table[self.row_ids[index]]
        sequences = [
            (torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool))
            for ids, mask in zip(row["ids"], row["targets"], strict=True)
        ]
        return sequences, json.loads(row["extra"])

    def _fact(self, name: str) -> Tensor:
        values = self._per_row[name]
        return torch.tensor([values[row] for row in self.row_ids], dtype=torch.int64)

    def _tokenised(self) -> Dataset:
        """Return the outcome of every row; of the processes of a machine one makes it where it is
        kept. Raise KeyboardInterrupt when it is interrupted, whatever the library makes of that.
        """
        rows, key = self._rows, self._cache_key()
        is_parallel = len(rows) >= PARALLEL_ROWS
        folder = Path(datasets.config.HF_DATASETS_CACHE) / "openrlhf"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / f"{key}.lock", timeout=LOCK_S):
                return rows.map(
                    self._tokenise,
                    with_indices=True,
                    desc=f"tokenising {self.subject}",
                    remove_columns=rows.column_names,
                    features=_FEATURES,
                    new_fingerprint=key,
                    num_proc=min(os.cpu_count() or 1, MAX_PROCESSES) if is_parallel else None,
                    cache_file_name=str(folder / f"{key}.arrow"),
                )
        except Exception as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            if isinstance(error, OSError) and error.errno is not None:
                raise cache_error(error) from error
            raise

    def _cache_key(self) -> str:
        """Return a hash of all that decides the result, this code included."""
        form, tokenizer = self._format, self._encoder.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = [
            self._rows._fingerprint,
            f"{type(self).__qualname__} {form!r} {self._joined} {self._encoder.end_ids}",
            f"{type(tokenizer).__name__} {tokenizer.init_kwargs} {tokenizer.special_tokens_map}",
            tokenizer.chat_template,
            sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str(),
        ]
        if self._processor is not None:
            parts += [self._processor.description, *self._picture_files()]
        modules = (images_module, tokenizer_module, vision_families)
        sources = [Path(str(module.__file__)) for module in modules]
        sources += Path(__file__).parent.glob("*.py")
        parts += [path.read_bytes() for path in sorted(sources)]
        # With the mark of a process at most 64 characters, says datasets.
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def _find_images(self, rows: Dataset) -> list[str]:
        """Return the columns of pictures: of mixed data sets, each may have its own."""
        asked = self._format.image_key
        if asked is not None:
            return pick_columns(columns_of(rows, self._format), (asked, (), "--image_key"))
        return [name for name in IMAGE_COLUMNS if name in rows.column_names]

    def _own_images(self, row: Row) -> list[Any]:
        """Return the values in the first column of pictures that has any in this row."""
        found = {name: values_of(value_at(row, name)) for name in self._image_keys}
        first, *others = [name for name, values in found.items() if values] or [""]
        self._encoder.unread |= {f"'{name}' of rows with '{first}'" for name in others}
        return found.get(first, [])

    def _image_columns(self, row: Row) -> list[str]:
        """Return the columns whose messages may hold pictures, in the order of a sequence."""
        read = [name for name in self._columns if name and name != self._format.label_key]
        return [*self.turn_columns(row), *read]

    def _picture_values(self, row: Row) -> list[Any]:
        """Return the values of a row's pictures, in the order of their placeholders."""
        columns, left = self._image_columns(row), iter(self._own_images(row))
        parts = [found for name in columns for found in values_in(value_at(row, name))]
        found = [next(left, None) if value is None else value for value in parts]
        return [*(value for value in found if value is not None), *left]

    def _picture_files(self) -> Iterator[tuple[object, ...]]:
        """Yield the size of each file of pictures, and the time of its last change, which cannot be
        set: the tokens of another file are not those of this one.
        """
        for row_id, row in enumerate(self._rows if self._reads_images else ()):
            with suppress(RowError):  # is told where the row is tokenised
                for value in self._picture_values(self.read(row)):
                    if (path := file_of(value, row_folder(self._rows, row_id))) is not None:
                        yield str(path), path.stat().st_size, path.stat().st_ctime_ns

    def _pictures(self, row: Row, row_id: int) -> tuple[Picture, ...]:
        """Return the pictures of a row that was read; raise RowError for one that is unreadable,
        and for too many.
        """
        if self._processor is None or not self._reads_images:
            return ()
        if other := next((name for name in OTHER_MEDIA if row.get(name)), None):
            raise RowError(f"'{other}' has a value, and only text and images are read")
        values, most = self._picture_values(row), self._format.max_images_per_prompt
        if most is not None and len(values) > most:
            raise RowError(f"{len(values)} images, over --max_images_per_prompt {most}")
        folder = row_folder(self._rows, row_id)
        try:
            pictures = tuple(read_picture(value, folder=folder) for value in values)
            for picture in pictures:
                self._processor.num_tokens(picture)  # raises for a shape that it does not read
                if picture.has_more_frames:
                    self._encoder.unread.add("frames of images behind the first")
            return pictures
        except PictureError as error:
            raise RowError(str(error)) from error

    def _with_pixels(self, tokens: Tokens, pictures: Sequence[Picture]) -> Tokens:
        """Return a sequence with a run of placeholders for each picture; none of them is learnt."""
        processor = self._processor
        if processor is None:
            return tokens
        banned = {*processor.banned_token_ids}
        if not self._reads_images and banned & {*tokens.ids}:
            raise RowError("its text spells the placeholder of an image. Take it out")
        try:
            parts = processor.expansions(tokens.ids, pictures)
        except PictureError as error:
            remedy = "Mark each by <image> in a text of the user, or by a part of type image"
            raise RowError(f"{error}. {remedy}, and use the chat template") from error
        flags = [m and i not in banned for i, m in zip(*tokens, strict=True)]
        mask = [flag for flag, part in zip(flags, parts, strict=True) for _ in part]
        return Tokens([each for part in parts for each in part], mask)

    def _tokenise(self, row: Row, row_id: int) -> dict[str, object]:
        """Return the outcome of a row: the values of `_FEATURES`."""
        form, num_spelled = self._format, self._encoder.num_spelled
        self._encoder.unread.clear()
        tokens: list[Tokens] = []
        pictures: tuple[Picture, ...] = ()
        extra, left_out, problem, is_truncated = None, "", "", False
        try:
            is_empty = all(value is None for value in row.values())
            if is_empty and (damage := damage_of(self._rows, row_id)):
                raise RowError(damage[1])
            found = self.read(row)
            tokens, extra = self._tokens_of(found)
            pictures = self._pictures(found, row_id)
            tokens = [self._with_pixels(part, pictures) for part in tokens]
            longest = max(len(part.ids) for part in tokens)
            if form.max_len is not None and longest > form.max_len:
                if form.overlong == "error":
                    raise RowError(f"{longest} tokens, over the limit of {form.max_len}")
                if form.overlong == "filter" or pictures:  # a picture is never cut
                    raise LeftOutError("over-long")
                is_truncated = True
                tokens, extra = self._cut(tokens, extra, form.max_len)
            self._check_useful(tokens)
        except LeftOutError as error:
            tokens, left_out = [], str(error)
        except RowError as error:
            tokens, problem = [], str(error)
        ids, targets = [part.ids for part in tokens], [part.mask for part in tokens]
        told, hashes = json.dumps(extra, default=str), [picture.sha256 for picture in pictures]
        held = [ids, targets, told, *([hashes] if hashes else [])]
        pad = None if self._processor is None else self._processor.image_token_id
        return {
            "ids": ids,
            "targets": targets,
            "extra": told,
            "images": hashes,
            "left_out": left_out,
            "problem": problem,
            "is_truncated": is_truncated,
            "is_spelled": self._encoder.num_spelled > num_spelled,
            "unread": "\n".join(sorted(self._encoder.unread)),
            "num_tokens": sum(map(len, ids)),
            "longest": max(map(len, ids), default=0),
            "largest_id": max((max(part, default=0) for part in ids), default=0),
            "num_image_tokens": sum(part.count(pad) for part in ids),
            "digest": hashlib.sha256(json.dumps(held).encode()).hexdigest(),
        }

    def _report(self) -> None:
        """Note what is not read, how many rows were left out or cut, or spell control tokens; raise
        DataError if none is left.
        """
        num_rows, form = len(self._rows), self._format
        fields = {name for names in set(self._per_row["unread"]) for name in names.splitlines()}
        if unread := [*map(repr, self._unread), *sorted(fields)]:
            has_meaning = {*PROMPT_COLUMNS, *DIALOGUE_COLUMNS, *IMAGE_COLUMNS} & {*self._unread}
            told = f"not read: {', '.join(unread)}"
            self.notices.append(Caution(told) if has_meaning else told)
        if num_spelled := sum(self._per_row["is_spelled"]):
            how = "text"
            if form.allow_special_tokens and not form.apply_chat_template:
                how = "control tokens. --allow_special_tokens false reads them as text"
            told = f"{num_spelled} of {num_rows} rows spell control tokens, which are read as"
            self.notices.append(f"{told} {how}")
        if (end := self._encoder.new_end) and form.apply_chat_template:
            told = f"{end} ends turns in the chat template, and the model's own settings do not"
            self.notices.append(f"{told} know it: responses end with it, and exports say so")
        for reason, count in sorted(self.dropped.items()):
            self.notices.append(Caution(f"{count} of {num_rows} rows were left out: {reason}"))
        if beyond := beyond_limit(self._rows):
            self.notices.append(Caution(beyond))
        if self.num_truncated:
            told = f"{self.num_truncated} of {num_rows} rows were cut at {form.max_len} tokens"
            self.notices.append(Caution(told))
        if not len(self):
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self.dropped.items())
            raise DataError(
                f"none of {num_rows} rows can be learned from ({reasons}). Check {self.flags}."
            )


def write_bad_rows(path: Path, *data_sets: Any) -> None:
    """Write the bad rows of data sets, or None, that were skipped: JSON lines with what is wrong;
    say so.
    """
    path.unlink(missing_ok=True)
    lines = [
        {"place": data.row_location(row), "problem": what, "row": data.source(row)}
        for data in data_sets
        for row, what in (data.bad_rows if data else ())
    ]
    if lines:
        path.write_text("".join(json.dumps(line, default=str) + "\n" for line in lines))
        say_notices([f"bad rows that were left out: {len(lines)}; they are in {path}"])


def columns_of(rows: Dataset, form: RowFormat) -> list[str]:
    """Return the columns of a data set, and names such as `a.b` of the format that are within."""
    nested = [name for name in form.named_columns if name not in rows.column_names]
    return [*rows.column_names, *(name for name in nested if _is_within(rows.features, name))]


def _is_within(features: Mapping[str, Any], name: str) -> bool:
    head, _, rest = name.partition(".")
    inner = features.get(head)
    if isinstance(inner, Mapping):
        return not rest or _is_within(inner, rest)
    return inner is not None and (not rest or isinstance(inner, (datasets.Json, ExactJson)))


def value_at(row: Row, name: str) -> Any:
    """Return the value of a column, or of `a.b` within one; None where a part is missing."""
    if name in row:
        return row[name]
    head, _, rest = name.partition(".")
    inner = row.get(head)
    return value_at(inner, rest) if rest and isinstance(inner, Mapping) else None


def prompt_columns(found: Sequence[str]) -> tuple[str, ...]:
    """Return the usual columns of prompts, the first of them first: Alpaca's `instruction` stands
    before its `input`.
    """
    is_alpaca = {"instruction", "input"} <= {*found}
    return ("instruction", *PROMPT_COLUMNS) if is_alpaca else PROMPT_COLUMNS


def pick_columns(found: Sequence[str], *wanted: tuple[str | None, Sequence[str], str]) -> list[str]:
    """Return for each (flag's value, candidates, flag) the column that the flag names, or else the
    first candidate that is there; raise DataError that names all that are not there.
    """
    names, problems = [], []
    for asked, usual, flag in wanted:
        there = [name for name in (usual if asked is None else (asked,)) if name in found]
        names += there[:1]
        if not there:
            problems.append(
                f"column '{asked or usual[0]}' is not in the data set; columns found: "
                f"{', '.join(found) or 'none'}. Give the right one with {flag}."
            )
    if problems:
        raise DataError(problems)
    return names


def holds_dialogues(rows: Dataset, column: str) -> bool:
    """Return True if the first value of a column that is not empty is a message list, or spells
    one.
    """
    values = rows[column] if column in rows.column_names else (value_at(r, column) for r in rows)
    try:
        first = spelled_messages(next(filter(None, values), None))
    except RowError:  # the row is refused where it is read
        return True
    return isinstance(first, (list, tuple, Mapping))


def refuse_classes(rows: Dataset, name: str | None) -> None:
    """Raise DataError where a column of labels holds the numbers of named classes: which of them
    are good, nobody has said.
    """
    kind = rows.features.get(name)
    kind = getattr(kind, "feature", kind)
    if isinstance(kind, ClassLabel):
        raise DataError(
            f"column '{name}' holds the numbers of the classes {', '.join(kind.names)}, and which "
            "are good is not said. Write true and false, or the labels themselves, into it."
        )


def number_of(value: object) -> float | None:
    """Return a number or truth value, also one spelled out as in a CSV file; else None."""
    words = {"true": 1.0, "false": 0.0}
    try:
        return float(words.get(str(value).strip().lower(), value))  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None


def repeats(held_out: Any, training: Any) -> list[Caution]:
    """Return the line that evaluation data has the rows of the training data, if it is so."""
    if held_out.fingerprint != training.fingerprint:
        return []
    return [Caution("--eval_dataset has the rows of the training data: give it others, if you can")]


def news(lines: Iterable[str], said: Sequence[str]) -> list[str]:
    """Return the notices of a second data set that the first does not have; cautions, which count
    rows, are always new.
    """
    return [line for line in lines if isinstance(line, Caution) or line not in said]
