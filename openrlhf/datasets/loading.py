"""From what a user types (files, folders, saved data sets, hub names, comma lists) to one table of
rows. Parquet, Arrow and hubs are read by the datasets library; JSON and CSV here, as they stand.

The library loads some damaged files as if they were whole (a byte that is not UTF-8, NaN, mixed
types); what is wrong is found here, before any model is loaded, and named by file and line. Knows
no column but `id`: what else a row must hold is the business of the data set classes.
"""

import csv
import errno
import glob
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast
from warnings import catch_warnings

import datasets
import pyarrow as pa
from datasets import Dataset, Features, Value
from datasets.data_files import SPLIT_KEYWORDS, DataFilesDict, EmptyDatasetError, get_data_patterns
from datasets.exceptions import DatasetGenerationError, DatasetsError
from datasets.features.features import register_feature

from openrlhf.config.base import DATA_SUFFIXES
from openrlhf.config.common import last_words
from openrlhf.config.local_paths import names_in, path_of
from openrlhf.datasets.strict_json import strict_json
from openrlhf.errors import ConfigError, DataError, Gathered, first_line
from openrlhf.utils.console import warn_once
from openrlhf.utils.progress import are_drawn

T = TypeVar("T")
Parts: TypeAlias = list[tuple[str, Dataset]]  # of a data set: file, its rows
Damage: TypeAlias = tuple[str, str, str]  # of a record: its location, what is wrong, its text
# Rows of a file: its name, their number, the data set among several, damage by row number.
Origin: TypeAlias = tuple[str, int, str | None, dict[str, Damage]]

MAX_LINE_MIB = 64
MAX_SHOWN = 20  # bad rows
HALF = "half a character (a surrogate without its other)"
# In which problems of one kind differ: the location, and what is quoted or counted.
_VALUES = re.compile(r"^.*?(?:row |:)\d+: |'[^']*'|\"[^\"]*\"|\d+")
REPAIR = "Repair or remove them."
NO_ROW = "Repair them: JSON has an object a line, or one array; other files end with "
NO_ROW += ".csv, .parquet or .arrow."
LEAVE_OUT = "Repair or remove them, or type --bad_rows skip to leave them out."
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}  # all others hold JSON or CSV
_DAMAGED = (DatasetsError, pa.ArrowException, ValueError, TypeError)
# How files begin that are neither JSON nor CSV, whatever their names say.
_OTHER_KINDS = {
    **{b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"},
    **{b"PK\3\4": "a zip archive", b"PAR1": "Parquet"},
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "UTF-16"),
}
_BLANK = b"\xef\xbb\xbf \t\r\n"  # a byte order mark too


def load_rows(
    spec: str,
    *,
    split: str = "train",
    probs: str | None = None,
    max_samples: int | None = None,
    seed: int = 42,
    expect_rows: str | None = None,
    expect_sha256: str | None = None,
    allowed: Collection[str] = (),  # of "repeated ids" and "damaged records"
) -> Dataset:
    """Return the rows that a comma list of data sets names, blended by `probs` or else one after
    the other.

    `max_samples` limits each data set and the blend; `expect_rows` and `expect_sha256` have a value
    for each data set. A damaged record that is allowed becomes an empty row, which `damage_of`
    knows. Raise ConfigError or DataError with a one-line remedy for each data set that cannot be
    used.
    """
    names = names_in("data", spec)
    if not any(names):
        raise ConfigError(
            "no data set is named. Give files, folders or hub names, separated by commas."
        )
    weights = _parse_probs(probs, names)
    counts = _one_for_each(expect_rows, names, "--expect_rows")
    hashes = _one_for_each(expect_sha256, names, "--expect_sha256")
    if not are_drawn():
        datasets.disable_progress_bars()
    gathered, found = Gathered(), []
    for name, count, digest in zip(names, counts, hashes, strict=True):
        parts = []
        with gathered:
            parts = _load_one(name, split, count, digest)
            for file, rows in parts if "damaged records" not in allowed else ():
                with gathered:
                    _refuse_damaged(file, _damaged(rows), LEAVE_OUT)
            if "repeated ids" not in allowed:
                _refuse_repeated_ids(parts)
        found.append(parts)
    gathered.raise_if_any()
    capped = [_capped(parts, max_samples) for parts in found]
    rows = _blend(capped, _short(names), weights, seed, max_samples)
    if weights is None and len(found) > 1 and max_samples is not None:
        sizes = [sum(len(part) for _, part in parts) for parts in found]
        _describe(rows, *_files(rows.info.description), beyond=_beyond(names, sizes, max_samples))
    return rows


def _beyond(names: Sequence[str], sizes: Sequence[int], max_samples: int) -> str:
    """Return a line about data sets of which rows stand beyond the limit of samples."""
    left, told = max_samples, []
    for name, size in zip(names, sizes, strict=True):
        if size > left:
            told.append(f"{left:,} of {size:,} rows of {name}")
        left = max(left - size, 0)
    return f"the limit of {max_samples:,} samples leaves {', '.join(told)}" if told else ""


def _short(names: Sequence[str]) -> list[str | None]:
    """Return names of several data sets without folders and suffixes; [None] for a single one."""
    bare = [name.removesuffix(next(filter(name.endswith, DATA_SUFFIXES), "")) for name in names]
    return [*last_words(bare)] if len(names) > 1 else [None]


def _parse_probs(probs: str | None, names: Sequence[str]) -> list[float] | None:
    """Return blending probabilities that sum to 1, or None for one data set after the other."""
    if not probs:
        return None
    try:
        weights = [float(item) for item in probs.split(",")]
    except ValueError:
        weights = []
    if len(weights) != len(names) or min(weights) <= 0 or abs(sum(weights) - 1) > 1e-3:
        raise ConfigError(
            f"probabilities {probs!r} of {len(names)} data sets. Give a positive number for each, "
            "with the sum 1, e.g. 0.7,0.3."
        )
    return [weight / sum(weights) for weight in weights]


def _one_for_each(values: str | None, names: Sequence[str], flag: str) -> Sequence[str | None]:
    if not values:
        return [None] * len(names)
    each = [value.strip() for value in values.split(",")]
    if len(each) != len(names):
        raise ConfigError(
            f"{flag} {values} is of {len(each)} data sets, and {len(names)} are named. Give one "
            "for each."
        )
    return each


def _capped(parts: Parts, max_samples: int | None) -> Parts:
    """Return the first rows of the parts: so many besides damaged ones."""
    if max_samples is None:
        return parts
    left, capped = max_samples, []
    for name, rows in parts:
        good = [*islice((i for i in range(len(rows)) if not damage_of(rows, i)), left)]
        left -= len(good)
        capped.append((name, rows if left else rows.select(range(max(good, default=-1) + 1))))
    return capped


def _blend(
    found: list[Parts],
    short_names: Sequence[str | None],
    weights: list[float] | None,
    seed: int,
    max_samples: int | None,
) -> Dataset:
    """Return all rows of the data sets, or rows drawn from them until one is used up; raise
    DataError if their columns differ in type.
    """
    parts = [part for each in found for part in each]
    try:
        found = _with_exact_columns(found)
        parts = [part for each in found for part in each]
        if weights is None:
            rows = datasets.concatenate_datasets([rows for _, rows in parts])
        else:
            wholes = [datasets.concatenate_datasets([rows for _, rows in each]) for each in found]
            rows = datasets.interleave_datasets(wholes, probabilities=weights, seed=seed)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DataError(
            f"{', '.join(name for name, _ in parts)} do not fit together: {first_line(error)} "
            "Give their common columns the same types; columns of a csv file are text."
        ) from error
    named = [
        (short, *part) for each, short in zip(found, short_names, strict=True) for part in each
    ]
    _describe(rows, *((file, len(p), short, _damaged(p)) for short, file, p in named))
    return _capped([("", rows)], max_samples)[0][1]


def _with_exact_columns(found: list[Parts]) -> list[Parts]:
    """Return the data sets with each column exact in all of them that is so in one; raise TypeError
    if its types differ.
    """
    kind, tables = ExactJson(), [rows for parts in found for _, rows in parts]
    exact = {n for rows in tables for n, f in rows.features.items() if isinstance(f, ExactJson)}

    for name in exact:
        columns = [rows[name] for rows in tables if name in rows.column_names]
        first = [next((value for value in c if value is not None), None) for c in columns]
        if len(kinds := {_kind(value) for value in first if value is not None}) > 1:
            raise TypeError(f"column '{name}' mixes types: {' and '.join(sorted(kinds))}.")

    def aligned(rows: Dataset) -> Dataset:
        for name in exact & set(rows.column_names):
            if not isinstance(rows.features[name], ExactJson):
                texts = [kind.encode_example(without_nulls(value)) for value in rows[name]]
                added = rows.add_column(f"{name} as JSON", texts, feature=kind)
                rows = added.remove_columns(name).rename_column(f"{name} as JSON", name)
        return rows

    return [[(name, aligned(rows)) for name, rows in parts] for parts in found]


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that a table sets to null because other rows have them."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [*map(without_nulls, value)] if isinstance(value, (list, tuple)) else value


def _load_one(name: str, split: str, num_rows: str | None, sha256: str | None) -> Parts:
    """Return the parts of a data set; raise ConfigError or DataError for one that is not what it
    is expected to be.
    """
    path = _local_path(name)
    if sha256:
        _check_hash(name, path, sha256.lower())
    parts = [(name, _from_hub(name, split))] if path is None else _load_local(path, name, split)
    if not (count := sum(len(rows) for _, rows in parts)):
        raise DataError(f"data set {name} has 0 rows in split '{split}'. Give one that has rows.")
    if num_rows and num_rows != str(count):
        raise DataError(
            f"data set {name} has {count} rows, not {num_rows}. Fetch it again, or correct "
            "--expect_rows."
        )
    return [(name, rows) for name, rows in parts if len(rows)]


def _refuse_damaged(path: str | Path, damaged: Mapping[str, Damage], remedy: str) -> None:
    """Raise DataError that lists the damaged records of a file, if there are any."""
    problems = [f"{location}: {problem}" for location, problem, _ in damaged.values()]
    raise_bad_rows(str(path), problems, remedy)


def _refuse_repeated_ids(parts: Parts) -> None:
    """Raise DataError that lists rows whose `id` another row of the same data set has."""
    locations: dict[object, str] = {}
    problems = []
    for name, rows in parts:
        if "id" not in rows.column_names or "finish_reason" in rows.column_names:
            continue  # responses of `infer` have the id of their prompt
        for number, value in enumerate(rows["id"], start=1):
            location = f"{name}: row {number}"
            if isinstance(value, (str, int)) and locations.setdefault(value, location) != location:
                problems.append(f"{location}: id {value!r} is that of {locations[value]}, too")
    raise_bad_rows(
        "repeated ids",
        problems,
        "Give each row its own, or type --duplicate_ids keep if that is meant.",
    )


def _check_hash(name: str, path: Path | None, expected: str) -> None:
    if path is None or not path.is_file():
        raise ConfigError(
            f"--expect_sha256 is of a file, and data set {name} is none. Leave it out, or name the "
            "file."
        )
    if (found := _sha256(path)) != expected:
        raise DataError(
            f"{path} has the SHA-256 {found}, not {expected}. Fetch the file again, or "
            "correct --expect_sha256."
        )


def _sha256(path: Path) -> str:
    """Return the hash of a file, which is read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _local_path(name: str) -> Path | None:
    """Return the path of `path` or `folder@subfolder`, None for a hub name; raise ConfigError for a
    path that does not exist, a script or a URL.
    """
    path = path_of("data", name)
    is_missing = path is not None and not path.exists()
    if is_missing or "://" in name or name.endswith(".py"):
        raise ConfigError(
            f"data set {name} does not exist; scripts are never run, and URLs not fetched. "
            f"Give a file ({', '.join(DATA_SUFFIXES)}), a folder of them, or a hub name."
        )
    return path


def _load_local(path: Path, name: str, split: str) -> Parts:
    if path.is_file():
        return _read_files([path])  # a file has no splits: it is what was asked for
    if not any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
        return _read_files(_pick(_files_by_split(path), name, split))
    try:
        saved = datasets.load_from_disk(str(path))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged: {first_line(error)} Save it again.") from error
    if isinstance(saved, Dataset):
        saved = {str(saved.split or split): saved}
    return [(name, _pick(saved, name, split))]


def _pick(by_split: Mapping[str, T], name: str, split: str) -> T:
    """Return the files of a split, or of one that a usual other name such as `dev` stands for."""
    kinds = {word: str(kind) for kind, words in SPLIT_KEYWORDS.items() for word in words}
    for found in (split, kinds.get(split, split)):
        if found in by_split:
            return by_split[found]
    raise ConfigError(
        f"data set {name} has no split '{split}'; splits found: {', '.join(sorted(by_split))}. "
        "Name one of them with --eval_split, --dataset_split or --prompt_split."
    )


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    """Return data files by the split that their name or folder says, as the library finds them; all
    are `train` where none says one.
    """
    base = glob.escape(str(folder))
    try:
        found = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    except (EmptyDatasetError, FileNotFoundError):
        found = {}
    folder = Path(os.path.abspath(folder))  # as the library names the files
    files = {
        str(split): sorted(Path(path) for path in paths if path.endswith(DATA_SUFFIXES))
        for split, paths in found.items()
    }
    beside = {path for path in folder.iterdir() if path.name.endswith(DATA_SUFFIXES)}
    if others := sorted(path.name for path in beside.difference(*files.values())):
        told = "whose names say no split, beside files that say one"
        warn_once(f"not read of folder {folder}: {', '.join(others)}, {told}.")
    if not any(files.values()):
        raise ConfigError(
            f"folder {folder} has no data files. Put {', '.join(DATA_SUFFIXES)} files into it."
        )
    return {split: paths for split, paths in files.items() if paths}


def _read_files(paths: list[Path]) -> Parts:
    """Return the rows of each file; raise DataError with all their problems."""
    gathered, found = Gathered(), []
    for path in paths:
        with gathered:
            found.append((str(path), read_file(path)))
    gathered.raise_if_any()
    return found


def _from_hub(name: str, split: str) -> Dataset:
    """Return a hub data set `name` or `name@subset`: a configuration, or a folder of data files."""
    repository, _, subset = name.partition("@")
    try:
        if subset and subset not in datasets.get_dataset_config_names(repository):
            return datasets.load_dataset(repository, data_dir=subset, split=split)
        return datasets.load_dataset(repository, subset or None, split=split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) else None
        raise _cache_trouble(reason or error) or ConfigError(
            f"data set {name} cannot be loaded from the hub (split '{split}'): "
            f"{first_line(reason or error)} "
            "Check the name and the split, or give a local path."
        ) from error


def read_file(path: Path) -> Dataset:
    """Return the rows of a data file; raise DataError that lists its bad lines, or ConfigError for
    what is not about the file.
    """
    try:
        before = path.stat()
        rows = _load_file(path)
        after = path.stat()
    except (*_DAMAGED, OSError, EOFError, zlib.error) as error:
        reason = error.__cause__ or error
        raise _cache_trouble(reason, path) or _file_trouble(path, reason) from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"{path} changed while it was read. Start again once it is written.")
    return rows


def _cache_trouble(error: BaseException, path: Path | None = None) -> ConfigError | None:
    """Return the error of the library's own files, if it is one: not of `path`, which is read."""
    is_system = isinstance(error, OSError) and error.errno not in (None, errno.EIO)
    if not is_system or (path is not None and error.filename == str(path)):
        return None
    return cache_error(cast(OSError, error))


def cache_error(error: OSError) -> ConfigError:
    """Return the error of a cache that cannot be written."""
    folder = error.filename or datasets.config.HF_DATASETS_CACHE
    return ConfigError(
        f"the cache of data sets cannot be written: {folder}: {error.strerror}. Set "
        "HF_DATASETS_CACHE to a folder with room that you may write to."
    )


def _file_trouble(path: Path, error: BaseException) -> DataError:
    """Return the error of a file that cannot be read."""
    told = f"{path} cannot be read: {first_line(error).rstrip('.')}."
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
        return DataError(f"{told} Allow yourself to read it.")
    if isinstance(error, pa.ArrowInvalid):
        return DataError(f"{path} is damaged: {first_line(error).rstrip('.')}. Write it again.")
    if isinstance(error, (OSError, EOFError, zlib.error)):
        return DataError(f"{told} Write it again.")
    return DataError(f"{told} Write its columns with text, numbers, lists or objects.")


def _load_file(path: Path) -> Dataset:
    if path.suffix not in _BUILDERS:
        return _load_records(path)
    # The library caches rows under path and time, which another file may have. The hash of 10 GB
    # takes seconds, their conversion minutes.
    named = {"name": _sha256(path), "data_files": glob.escape(str(path)), "split": "train"}
    try:
        return datasets.load_dataset(_BUILDERS[path.suffix], **named)
    except _DAMAGED as error:
        if "corresponds to no data" in str(error):
            return Dataset.from_dict({})
        raise


@dataclass
class ExactJson:
    """A column whose values are as they stand in the file, whatever their types; kept as JSON text.

    The library's own `Json` rounds fractions and refuses integers beyond 64 bits.
    """

    pa_type: ClassVar[pa.DataType] = pa.string()
    _type: str = field(default="ExactJson", init=False, repr=False)

    def __call__(self) -> pa.DataType:
        return self.pa_type

    def encode_example(self, example_data: object) -> str | None:
        return None if example_data is None else json.dumps(example_data)

    def decode_example(self, example_data: str | None, token_per_repo_id: object = None) -> object:
        return None if example_data is None else json.loads(example_data)

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        return storage.cast(self.pa_type)  # encoded before


with catch_warnings(action="ignore"):  # it may change, says the library
    register_feature(ExactJson, "ExactJson")


class Record(NamedTuple):
    """A record of a file, and the row that it is or what is wrong with it.

    Example: `Record("rows.jsonl:3", b'{"input": "2+2="}', {"input": "2+2="})`
    """

    location: str
    raw: object  # its bytes; an item of a JSON array itself
    row: Any = None
    problem: str = ""
    is_mixed: bool = False  # of a type other than that of its column: which is right is not known

    @property
    def text(self) -> str:
        """Return the text of the record, with bytes that are none written as such."""
        if not isinstance(self.raw, bytes):
            return json.dumps(self.raw)
        return self.raw.decode(errors="backslashreplace").rstrip("\r\n")


def _load_records(path: Path) -> Dataset:
    """Return the rows of a JSON or CSV file as they stand there, with an empty one for a damaged
    record. Raise DataError where all are damaged, or types mixed.
    """
    _refuse_other_kinds(path)
    is_csv, is_mixed = path.suffix == ".csv", False
    columns, damaged, num_rows = dict[str, None](), dict[str, Damage](), 0
    for num_rows, record in enumerate(_records(path, columns), start=1):
        if record.problem:
            damaged[str(num_rows)] = (record.location, record.problem, record.text)
            is_mixed |= record.is_mixed
    if is_mixed or len(damaged) == num_rows:
        _refuse_damaged(path, damaged, REPAIR if is_csv or is_mixed else NO_ROW)
        return Dataset.from_dict({})
    # One object of several columns would give the table, as it is cached, another fingerprint.
    features = Features({n: Value("string") if is_csv else ExactJson() for n in columns})
    # The place in the cache follows from these. A hash, for another file may have the same size and
    # time (`cp -p`, archives); the file was read whole above, which takes longer.
    version = {"path": path, "sha256": _sha256(path), "code": _sha256(Path(__file__))}
    rows = Dataset.from_generator(_exact_rows, features=features, gen_kwargs=version)
    _describe(rows, (str(path), num_rows, None, damaged))
    return rows


def _refuse_other_kinds(path: Path) -> None:
    """Raise DataError for a file that is another kind than its name says."""
    with _open(path) as file:
        start = file.read(6)
    if kind := next((kind for mark, kind in _OTHER_KINDS.items() if start.startswith(mark)), None):
        raise DataError(
            f"{path} is {kind}, not text in UTF-8. Convert it, or let its name say what it is: "
            f"{', '.join(DATA_SUFFIXES)}."
        )


def _exact_rows(path: Path, sha256: str, code: str) -> Iterator[dict[str, Any]]:
    for record in _records(path, {}):
        yield {} if record.problem else record.row


def _records(path: Path, columns: dict[str, None]) -> Iterator[Record]:
    """Yield the records of a file; note the columns."""
    return _csv_records(path, columns) if path.suffix == ".csv" else _json_records(path, columns)


def _json_records(path: Path, columns: dict[str, None]) -> Iterator[Record]:
    """Yield the objects of JSON lines or of one JSON array."""
    kinds: dict[str, str] = {}
    for record in _json_values(path):
        if not record.problem and not isinstance(record.row, dict):
            record = record._replace(problem=f"{type(record.row).__name__} instead of an object")
        if not record.problem and (mixture := _mixture_of(record.row, kinds)):
            record = record._replace(problem=mixture, is_mixed=True)
        columns |= {} if record.problem else dict.fromkeys(record.row)
        yield record


def _mixture_of(row: dict[str, Any], kinds: dict[str, str]) -> str:
    """Return the problem with the types in a row, or else note them in `kinds` by column."""
    found = {name: _kind(value) for name, value in row.items() if value is not None}
    for name, kind in found.items():
        if kinds.get(name, kind) != kind:
            return f"column '{name}' mixes types: {kind} after {kinds[name]}. Use one type"
    kinds |= found
    return ""


def _kind(value: object) -> str:
    return "number" if type(value) in (int, float) else type(value).__name__


def _json_values(path: Path) -> Iterator[Record]:
    """Yield every line that is not blank, or every item of an array."""
    with _open(path) as file:
        is_array = ".jsonl" not in path.name and file.read(4096).lstrip(_BLANK).startswith(b"[")
    with _open(path) as file:
        lines = [(f"{path}:1", 0, file.read())] if is_array else _lines(path, file)
        for location, offset, line in lines:
            if not line.strip(_BLANK):
                continue
            try:
                value = strict_json(_text(line))
            except (ValueError, RecursionError) as error:
                reason = first_line(error)
                if isinstance(error, json.JSONDecodeError) and not is_array:
                    reason = f"{error.msg}, column {error.colno}"  # of the line of `location`
                told = f"not JSON: {reason} (record at byte {offset})"
                yield Record(location, line, problem=told)
                continue
            found = [Record(location, line, value)]
            if is_array:
                found = [Record(f"{path}: row {i}", item, item) for i, item in enumerate(value, 1)]
            may_break = b"\\ud" in line.lower()
            for record in found:
                is_half = may_break and not _is_text(record.row)
                yield record._replace(problem=HALF) if is_half else record


def _is_text(value: object) -> bool:
    """Return False for a value with half a character, which JSON can spell and no text holds."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _lines(path: Path, file: IO[Any]) -> Iterator[tuple[str, int, Any]]:
    """Yield (location, offset, line); raise DataError for a line that is too long."""
    offset, number, limit = 0, 1, MAX_LINE_MIB * 2**20
    while line := file.readline(limit + 1):
        if len(line) > limit:
            told = f"{path}:{number}: a line of over {MAX_LINE_MIB} MiB"
            raise_bad_rows(str(path), [told], REPAIR)
        yield f"{path}:{number}", offset, line
        offset, number = offset + len(line), number + 1


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else path.open("rb"))


def _text(line: bytes) -> str:
    """Return a line as text; raise ValueError for bytes that no text holds."""
    if b"\0" in line:
        raise ValueError("zero bytes, as after a power loss or a full disk")
    return line.decode("utf-8-sig")


def _csv_records(path: Path, columns: dict[str, None]) -> Iterator[Record]:
    """Yield the rows of a CSV file: every cell as the text it is, an empty one as no value."""
    csv.field_size_limit(MAX_LINE_MIB * 2**20)
    taken: list[str] = []  # lines of a record

    def taking(file: IO[str]) -> Iterator[str]:
        for _, _, line in _lines(path, file):
            taken.append(line)
            yield line
        taken.append("")  # belongs to a record only if its last quote is open
        yield ""

    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(taking(file), strict=True)
        for cells, fault in _csv_cells(reader):
            location, lines = f"{path}:{reader.line_num - len(taken) + 1}", [*taken]
            taken.clear()
            if not cells and not fault:
                continue
            raw = "".join(lines).encode(errors="surrogateescape")
            problem = _csv_problem(lines, raw, cells, columns, fault)
            # Whether the other lines are rows cannot be told; nor without names.
            if problem and (not columns or (fault and len([*filter(None, lines)]) > 1)):
                raise_bad_rows(str(path), [f"{location}: {problem}"], REPAIR)
            if columns:
                row = dict(zip(columns, (cell or None for cell in cells), strict=False))
                yield Record(location, raw, row, problem)
            else:
                columns |= _csv_columns(path, cells)


def _csv_cells(reader: Any) -> Iterator[tuple[list[str], str]]:
    """Yield the cells of each record, and what is wrong with its quotes."""
    while True:
        try:
            found = next(reader), ""
        except StopIteration:
            return
        except csv.Error as error:
            remedy = "Close each quote, and double those within a quoted cell"
            found = [], f"line {reader.line_num}: {first_line(error)}. {remedy}"
        yield found


def _csv_problem(
    lines: list[str], raw: bytes, cells: list[str], columns: Mapping[str, None], fault: str
) -> str:
    """Return the problem with a record of a CSV file, or nothing."""
    try:
        _text(raw)
    except ValueError as error:
        return first_line(error)
    if not lines[-1]:
        return "a quote is not closed"
    if fault or not columns or len(cells) == len(columns):
        return fault
    remedy = "Quote one with a comma in it"
    if len(cells) < len(columns):
        remedy = "Add those that are missing"
    return f"{len(cells)} cells, and the first line names {len(columns)} columns. {remedy}"


def _csv_columns(path: Path, names: list[str]) -> dict[str, None]:
    """Return the columns that the first line names; raise DataError for none or two of a name."""
    if "" in names:
        raise DataError(
            f"{path} has a column without a name: {', '.join(names)}. Name it, or leave out the "
            "comma in all lines."
        )
    if len(set(names)) < len(names):
        raise DataError(f"{path} has two columns of one name: {', '.join(names)}. Rename one.")
    return dict.fromkeys(names)


def raise_bad_rows(subject: str, problems: Sequence[str], remedy: str) -> None:
    """Raise one DataError that says how many problems there are, if any, and lists the first of
    each kind.
    """
    if not problems:
        return
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(_VALUES.sub("", problem), []).append(problem)
    lines, shown = [f"{subject}: {len(problems)} bad rows. {remedy}"], [*kinds.values()][:MAX_SHOWN]
    for alike in shown:
        first = alike[: MAX_SHOWN // len(shown)]
        hidden = len(alike) - len(first)
        lines += [*first, *([f"... and {hidden} more of this kind"] if hidden else [])]
    if hidden := len(kinds) - len(shown):
        lines.append(f"... and {hidden} more kinds")
    raise DataError(lines)


def _describe(rows: Dataset, *origins: Origin, beyond: str = "") -> None:
    """Keep with rows the files that they come from, one after the other, and a line about those
    that were not read.
    """
    rows.info.description = json.dumps({"files": origins, "beyond": beyond})


def beyond_limit(rows: Dataset) -> str:
    """Return the line about data sets of which rows stand beyond the limit; empty if none do."""
    description = rows.info.description or ""
    return json.loads(description)["beyond"] if _files(description) else ""


@lru_cache(maxsize=8)
def _files(description: str | None) -> list[Origin]:
    is_ours = (description or "").startswith('{"files": ')
    return json.loads(description or "")["files"] if is_ours else []


def _damaged(part: Dataset) -> dict[str, Damage]:
    """Return the damaged records of a file by their row number."""
    return next((damaged for *_, damaged in _files(part.info.description)), {})


def row_location(rows: Dataset, index: int) -> str:
    """Return `train.jsonl: row 17`, counted from 1 in its file; `row 17` for an unknown file; the
    line of a damaged record.
    """
    if damage := damage_of(rows, index):
        return damage[0]
    name, number, *_ = _origin(rows, index)
    return f"{name}: row {number}" if name else f"row {number}"


def row_folder(rows: Dataset, index: int) -> Path | None:
    """Return the folder of the file that a row is from, if it is known."""
    name, *_ = _origin(rows, index)
    return Path(name).expanduser().parent if name else None


def data_set_of(rows: Dataset, index: int) -> str | None:
    """Return the name of the data set that a row is of, if several were named."""
    return _origin(rows, index)[2]


def damage_of(rows: Dataset, index: int) -> Damage | None:
    """Return the damage of the record that an empty row stands for."""
    _, number, _, damaged = _origin(rows, index)
    return damaged.get(str(number))


def _origin(rows: Dataset, index: int) -> tuple[str | None, int, str | None, dict[str, Damage]]:
    """Return the file of a row, its number in it from 1, the data set and damage of the file."""
    drawn = rows._indices  # rows of a blend are picked from the data sets one after the other
    position = index if drawn is None else drawn.column(0)[index].as_py()
    for name, count, data_set, damaged in _files(rows.info.description):
        if position < count:
            return name, position + 1, data_set, damaged
        position -= count
    return None, index + 1, None, {}
