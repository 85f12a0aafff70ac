"""Samples of steps and evaluations as parquet files in the run folder, one row a sample."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from openrlhf.utils.console import warn_once
from openrlhf.utils.images import ImageProcessor, Picture, write_pictures
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.run_folder import IMAGES, ROLLOUTS

STEPS_PER_CLEANING = 50  # it reads a column of all files
TextsOf = Callable[[Sequence[int]], Sequence[str]]  # of tokens


def rollout_row(rollout: Rollout, processor: ImageProcessor | None) -> dict[str, object]:
    """Return a sample as a row of a file of rollouts; lists have a value for each token of the
    whole sequence, or for each sampled one. `images` names files in the folder of images, and the
    place of their tokens, from the first placeholder to the last.
    """
    versions, images = rollout.weight_versions, rollout.images
    more = {name: value for name, value in rollout.extra_columns.items() if name != IMAGES}
    if images and processor is not None:
        positions = processor.placeholders(rollout.token_ids.tolist(), images)
        more[IMAGES] = [
            {"sha256": image.sha256, "width": image.width, "height": image.height}
            | {"start": own[0], "num_tokens": own[-1] + 1 - own[0]}
            for image, own in zip(images, positions, strict=True)
        ]
    return {
        **more,
        "sample_id": rollout.sample_id,
        "row": rollout.row_id + 1,
        "group_id": rollout.group_id,
        "episode_id": rollout.episode_id,
        "datasource": rollout.datasource,
        "prompt": rollout.prompt_text,
        "response": rollout.response_text,
        "label": rollout.label,
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "score": rollout.score,
        "finish_reason": rollout.finish_reason,
        "num_actions": rollout.num_actions,
        "weight_version": int(versions[-1]),
        "token_ids": rollout.token_ids.numpy(),
        "action_mask": rollout.action_mask.numpy(),
        "logprobs": rollout.logprobs.numpy(),
        "weight_versions": versions.numpy(),
    }


def write_rollouts(
    run_dir: Path | str,
    step: int,
    rows: Sequence[Mapping[str, object]],
    *,
    num_kept: int,
    kind: Literal["step", "eval_step"] = "step",
    token_texts: TextsOf | None = None,
    images: Iterable[Picture] = (),
) -> Path | None:
    """Write one step's samples as parquet, one row a sample, over an earlier attempt's:
    `rollouts/step_000001.parquet`, those of an evaluation `rollouts/eval_step_000001.parquet`;
    their images in `rollouts/images`, once each. Return the file, or None where a full disk lost
    it, which is said once. The last `num_kept` files of each kind stay.

    Rows may differ in their columns; a missing one is null. Values parquet has no common type for
    are written as JSON text. `token_texts` returns the text of each token: it makes the column of
    that name beside `token_ids`.
    """
    import pyarrow.parquet  # noqa: PLC0415 - heavy

    folder = Path(run_dir) / ROLLOUTS
    path = folder / f"{kind}_{step:06d}.parquet"
    unfinished = path.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_pictures(folder / IMAGES, images)
        table = _as_table(rows, token_texts)
        pyarrow.parquet.write_table(table, unfinished, use_dictionary=_repeating(table))
        unfinished.replace(path)
        earlier = [other for other in folder.glob(f"{kind}_*.parquet") if other <= path]
        removed = sorted(earlier)[:-num_kept]
        for other in removed:
            other.unlink()
        if removed and step % STEPS_PER_CLEANING == 0:
            _remove_unseen(folder)
    except OSError as error:
        warn_once(f"rollouts cannot be written to {folder} ({error}); training goes on.")
        return None
    return path


def images_of(rollouts: Iterable[Rollout]) -> Iterator[Picture]:
    """Yield the images of samples."""
    return (image for rollout in rollouts for image in rollout.images)


def _remove_unseen(folder: Path) -> None:
    """Remove images that no file of this folder names any more."""
    import pyarrow.parquet  # noqa: PLC0415 - heavy

    if not (folder / IMAGES).exists():
        return
    seen: set[str] = set()
    for path in folder.glob("*.parquet"):
        table = pyarrow.parquet.ParquetFile(path).read(columns=["images"])
        named = table.column("images").to_pylist() if table.num_columns else []
        seen.update(image["sha256"] for images in named for image in images or ())
    for path in (folder / IMAGES).iterdir():
        if path.stem not in seen:
            path.unlink()


def _as_table(rows: Sequence[Mapping[str, object]], token_texts: TextsOf | None) -> Any:
    """Return a pyarrow table of all columns of the rows, in the order of first appearance."""
    import pyarrow  # noqa: PLC0415 - heavy

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [_plain(row.get(name)) for row in rows] for name in names}
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pyarrow.array(values)
            if _holds_empty_struct(arrays[name].type):
                raise pyarrow.ArrowNotImplementedError("parquet has no empty struct")
        except (pyarrow.ArrowException, OverflowError, UnicodeError):
            texts = [None if v is None else json.dumps(v, default=str) for v in values]
            arrays[name] = pyarrow.array(texts, pyarrow.string())
    if token_texts is not None and (ids := arrays.get("token_ids")) is not None:
        tokens = ids.values.dictionary_encode()  # the text of each token is looked up once
        texts = pyarrow.array(token_texts(tokens.dictionary.to_pylist()), pyarrow.string())
        values = pyarrow.DictionaryArray.from_arrays(tokens.indices, texts)
        arrays["token_texts"] = pyarrow.ListArray.from_arrays(ids.offsets, values)
    return pyarrow.table(arrays)


def _repeating(table: Any) -> list[str]:
    """Return the columns whose values repeat: looking for repeated log-probs takes half of the
    time of writing, and finds none.
    """
    import pyarrow.types as kinds  # noqa: PLC0415 - heavy

    names = []
    for field in table.schema:
        if not kinds.is_list(field.type):
            names.append(field.name)
        elif not kinds.is_floating(field.type.value_type):
            names.append(f"{field.name}.list.element")
    return names


def _holds_empty_struct(kind: Any) -> bool:
    import pyarrow.types as kinds  # noqa: PLC0415 - heavy

    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return (kinds.is_struct(kind) and not inner) or any(map(_holds_empty_struct, inner))


def _plain(value: object) -> object:
    """Return tensors as lists, and an empty mapping as None."""
    if hasattr(value, "__array_interface__") and getattr(value, "ndim", 0) == 1:
        return value  # of numpy, which pyarrow reads faster than a list
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value) or None
    return value
