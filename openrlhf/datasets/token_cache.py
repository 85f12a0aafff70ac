"""Tokenised data sets on disk: the second run on the same rows starts where the first one did.

An entry is found by what it was made from: rows, tokenizer, format, and the code that made it. It
is written under another name first and carries its own hash, so a torn or damaged one is made anew.
Of several processes that want an entry one makes it. Knows nothing of formats and columns.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from typing import IO, cast

import datasets
import pyarrow as pa
from datasets import Dataset

from openrlhf.datasets.token_store import TokenizedRows, TokenStore
from openrlhf.utils import tokenizer as tokenizer_module
from openrlhf.utils.tokenizer import Tokenizer

MIN_ROWS = 1000  # fewer are tokenised sooner than they are looked up
MAX_AGE_S = 30 * 24 * 3600  # entries nobody used for so long are removed
PATIENCE_S = 20.0  # for the process that goes first to begin
POLL_S = 0.05
_PATIENCE: ContextVar[float] = ContextVar("patience_s", default=0.0)
_DIGEST_SIZE = 32
_LENGTH_SIZE = 8
_SUFFIX = ".tokens"


class _DamagedError(ValueError):
    """A file that is no whole cache entry."""


def cache_folder() -> Path:
    """`$OPENRLHF_CACHE`, else a folder beside the caches of Hugging Face."""
    root = os.environ.get("OPENRLHF_CACHE")
    home = Path(root).expanduser() if root else Path(datasets.config.HF_CACHE_HOME) / "openrlhf"
    return home.expanduser() / "tokenized"


def cache_key(rows: Dataset, tokenizer: Tokenizer, recipe: str) -> str:
    """A hash of all that decides the token ids; `recipe` names the data set and its format."""
    digest = hashlib.sha256(recipe.encode())
    digest.update(rows_fingerprint(rows).encode())
    digest.update(tokenizer_fingerprint(tokenizer).encode())
    for package in ("transformers", "tokenizers"):
        digest.update(version(package).encode())
    sources = [*Path(__file__).parent.glob("*.py"), Path(str(tokenizer_module.__file__))]
    for path in sorted(sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def rows_fingerprint(rows: Dataset) -> str:
    """A hash of the values of all rows in order."""
    digest = hashlib.sha256()
    sink = _HashSink(digest.update)
    for batch in rows.with_format("arrow").iter(batch_size=10_000):
        table = cast(pa.Table, batch).replace_schema_metadata(None)
        with pa.ipc.new_stream(sink, table.schema) as writer:
            # A slice would bring bytes of its neighbours along; taking the rows copies them alone.
            writer.write_table(table.take(pa.array(range(table.num_rows))).combine_chunks())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of the files that the tokenizer is saved as, its chat template included."""
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def load_tokens(key: str) -> TokenizedRows | None:
    """The entry of a key; None when there is none or it is damaged."""
    path = _path_of(key)
    try:
        rows = _unpack(path.read_bytes())
        os.utime(path)
    except (OSError, _DamagedError):
        return None
    return rows


def save_tokens(key: str, rows: TokenizedRows) -> None:
    """Write an entry whole or not at all, and remove those that nobody uses; raises OSError."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in _pack(rows):
                file.write(part)
        Path(name).replace(_path_of(key))
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    for path in (*folder.iterdir(), *_lock_folder().glob("*")):
        with suppress(FileNotFoundError):  # another run tidies up too
            if time.time() - path.stat().st_mtime > MAX_AGE_S:
                path.unlink()


@contextmanager
def giving_way(*, gives_way: bool = True) -> Iterator[None]:
    """A block in which another process of this machine gets some time to begin filling an entry:
    the one that shows how far it is.
    """
    token = _PATIENCE.set(PATIENCE_S if gives_way else 0.0)
    try:
        yield
    finally:
        _PATIENCE.reset(token)


@contextmanager
def only_filler(key: str) -> Iterator[None]:
    """A block that one process of this machine is in at a time, to look again and fill the entry.

    The lock of one that died is free; a cache that cannot be written to has none.
    """
    try:
        file = _lock_file(key)
    except OSError:
        yield
        return
    with file:
        deadline = time.monotonic() + _PATIENCE.get()
        with suppress(OSError):  # a file system without locks
            while time.monotonic() < deadline and not (_is_held(file) or _path_of(key).exists()):
                time.sleep(POLL_S)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_file(key: str) -> IO[str]:
    folder = _lock_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / key).open("a")


def _lock_folder() -> Path:
    return cache_folder().with_name("locks")


def _is_held(file: IO[str]) -> bool:
    """Whether another process has the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _path_of(key: str) -> Path:
    return cache_folder() / (key + _SUFFIX)


def _pack(rows: TokenizedRows) -> list[bytes]:
    """Digest of what follows, length of the head, head as JSON, buffers."""
    buffers = [buffer for store in rows.stores for buffer in store.to_buffers()]
    head = {
        "row_ids": rows.row_ids,
        "extras": rows.extras,
        "dropped": dict(rows.dropped),
        "num_truncated": rows.num_truncated,
        "num_spelled": rows.num_spelled,
        "sizes": list(map(len, buffers)),
    }
    encoded = json.dumps(head).encode()
    parts = [len(encoded).to_bytes(_LENGTH_SIZE, "little"), encoded, *buffers]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return [digest.digest(), *parts]


def _unpack(content: bytes) -> TokenizedRows:
    view = memoryview(content)
    if hashlib.sha256(view[_DIGEST_SIZE:]).digest() != view[:_DIGEST_SIZE]:
        raise _DamagedError("the content does not match its hash")
    start = _DIGEST_SIZE + _LENGTH_SIZE
    stop = start + int.from_bytes(view[_DIGEST_SIZE:start], "little")
    head = json.loads(bytes(view[start:stop]))
    buffers = []
    for size in head["sizes"]:
        buffers.append(bytes(view[stop : stop + size]))
        stop += size
    return TokenizedRows(
        stores=[TokenStore.from_buffers(buffers[i : i + 3]) for i in range(0, len(buffers), 3)],
        row_ids=head["row_ids"],
        extras=head["extras"],
        dropped=Counter(head["dropped"]),
        num_truncated=head["num_truncated"],
        num_spelled=head["num_spelled"],
    )


class _HashSink:
    """A file that only remembers the hash of what is written."""

    closed = False

    def __init__(self, update: Callable[[bytes], None]) -> None:
        self._update = update

    def write(self, data: bytes) -> int:
        """Take in some bytes."""
        self._update(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The hash goes on with the next table."""
