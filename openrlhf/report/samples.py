"""The samples of a run as a page reads them, and an excerpt of them for a page without a server.

A file may lack columns, or have more than are known here: what is lacking is null, what is more is
shown beside a sample.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet

from openrlhf.errors import ConfigError, first_line
from openrlhf.utils.images import PictureError, read_picture
from openrlhf.utils.run_folder import IMAGES, ROLLOUTS
from openrlhf.utils.samples import spread

Row = dict[str, Any]
TOKEN_COLUMNS = (
    *("token_ids", "token_texts", "action_mask", "logprobs", "old_logprobs", "new_logprobs"),
    *("advantages", "weight_versions"),
)
# Columns of a table of samples, and the type that a search or an order needs.
COLUMNS = {
    "sample_id": "VARCHAR",
    "row": "BIGINT",
    "group_id": "BIGINT",
    "prompt": "VARCHAR",
    "response": "VARCHAR",
    "label": "VARCHAR",
    "datasource": "VARCHAR",
    "reward": "DOUBLE",
    "score": "DOUBLE",
    "advantage": "DOUBLE",
    "num_actions": "BIGINT",
    "finish_reason": "VARCHAR",
    "weight_version": "BIGINT",
}
MAX_SIDE = 256  # of an image, in pixels
MAX_EXCERPT_FILES = 40
MAX_EXCERPT_BYTES = 6_000_000
NUM_EXTREMES = 3  # of each end, as report.js shows


@dataclass(frozen=True)
class StepFile:
    """The samples of one step, or of one evaluation.

    Example: `StepFile("eval_step_000020.parquet", 20, True, 100)`
    """

    name: str
    step: int
    is_evaluation: bool
    num_samples: int

    @property
    def label(self) -> str:
        """Return its name for a person."""
        kind = "evaluation at step" if self.is_evaluation else "step"
        return f"{kind} {self.step} ({self.num_samples} samples)"


def step_files(run_dir: Path) -> list[StepFile]:
    """Return the files of a run: training, then evaluations, each in order."""
    found = []
    for path in sorted((run_dir / ROLLOUTS).glob("*.parquet")):
        named = re.fullmatch(r"(eval_)?step_(\d+)\.parquet", path.name)
        if named is not None:
            try:
                num_samples = pyarrow.parquet.read_metadata(path).num_rows
            except pyarrow.ArrowInvalid as error:
                raise ConfigError(f"{path} is damaged ({first_line(error)}). Remove it.") from error
            found.append(StepFile(path.name, int(named[2]), bool(named[1]), num_samples))
    return sorted(found, key=lambda file: (file.is_evaluation, file.step))


def excerpt(run_dir: Path, files: Sequence[StepFile]) -> list[Row]:
    """Return samples with their tokens, of steps that are spread over the run, as many as a page
    can hold: the latest steps first, and at least one sample of each while there is room. The best
    and the worst of the last file, which a page opens with, are among them.
    """
    chosen = spread(files, MAX_EXCERPT_FILES)[::-1]
    found: list[Row] = []
    left = MAX_EXCERPT_BYTES
    for index, file in enumerate(chosen):
        share = left // (len(chosen) - index)
        parquet = pyarrow.parquet.ParquetFile(run_dir / ROLLOUTS / file.name)
        first = {0, *(_extremes(parquet) if file == files[-1] else ())}
        is_full = False
        for number, record in enumerate(_records_of(parquet)):
            if is_full and number not in first:
                continue
            [row] = record.to_pylist()
            sample = sample_of(row, file.name, number, run_dir)
            num_bytes = len(json.dumps(sample))
            if num_bytes > (left if number in first else share):
                is_full = True
                continue
            share, left = share - num_bytes, left - num_bytes
            found.append(sample)
    return found


def _records_of(parquet: pyarrow.parquet.ParquetFile) -> Iterator[pyarrow.RecordBatch]:
    """Yield a batch of one row for each row, of which nothing is read before it is looked at."""
    for batch in parquet.iter_batches(batch_size=16):
        for k in range(batch.num_rows):
            yield batch.slice(k, 1)


def _extremes(parquet: pyarrow.parquet.ParquetFile) -> set[int]:
    """Return the numbers of samples with the highest and the lowest rewards, of several prompts."""
    known = [name for name in ("reward", "group_id", "row") if name in parquet.schema_arrow.names]
    rows = parquet.read(known).to_pylist()
    rated = [k for k, row in enumerate(rows) if plain(row.get("reward")) is not None]
    order = sorted(rated, key=lambda k: rows[k]["reward"])
    chosen: set[int] = set()
    for way in (order, order[::-1]):
        of_prompts: dict[object, int] = {}
        for k in way:
            of_prompts.setdefault(rows[k].get("group_id", rows[k].get("row")), k)
        chosen.update(islice(of_prompts.values(), NUM_EXTREMES))
    return chosen


def sample_of(row: Mapping[str, Any], file: str, number: int, run_dir: Path) -> Row:
    """Return a sample as the page reads it: the columns of the table, `parts` of its reward, its
    `tokens`, `images` and `others`; `file` and `number` say where it is.
    """
    row = dict(row)
    known: Row = {"file": file, "number": number}
    for name in COLUMNS:
        known[name] = plain(row.pop(name, None))
    if known["label"] is not None:
        known["label"] = str(known["label"])
    if known["group_id"] is None:
        known["group_id"] = known["row"]
    tokens = {name: plain(row.pop(name, None)) for name in TOKEN_COLUMNS}
    parts = row.pop("reward_parts", None)
    known["parts"] = plain(json.loads(parts) if isinstance(parts, str) else parts)
    known["tokens"] = tokens if tokens["token_texts"] is not None else None
    images = row.pop("images", None)
    known["images"] = [_shown(image, run_dir) for image in images or ()]
    if images and known["tokens"]:
        known["prompt"] = _with_words(known["prompt"], known["images"], tokens["token_texts"])
    known["others"] = {name: plain(value) for name, value in row.items() if value is not None}
    return known


def _shown(image: Mapping[str, Any], run_dir: Path) -> Row:
    """Return an image of a sample, small enough for a page; without `src` if its file is gone."""
    name = Path(f"{image['sha256']}.png").name  # of no other folder
    try:
        src = read_picture(run_dir / ROLLOUTS / IMAGES / name).data_url(MAX_SIDE)
    except PictureError:
        src = None
    return {**image, "src": src}


def _with_words(prompt: str, images: Sequence[Row], texts: Sequence[str]) -> str:
    """Return a prompt with words in place of the placeholders of each image."""
    for number, image in enumerate(images, start=1):
        count = image["num_tokens"]
        image["words"] = (
            f"[image {number}: {image['width']}x{image['height']}, {count} "
            f"token{'s' if count != 1 else ''}]"
        )
        first, *others = texts[image["start"] :][:count]
        either = f"{re.escape(first)}({re.escape(''.join(others))})?"  # of an agent, or of data
        prompt = re.sub(either, image["words"], prompt, count=1)
    return prompt


def plain(value: Any) -> Any:
    """Return a value as JSON has it: numbers to six digits, None for one that is not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)
