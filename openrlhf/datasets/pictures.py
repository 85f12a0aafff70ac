"""The pictures of a row: their placeholders in its messages, and the values they are read from.

In the text of a message one character stands for a picture. A value is all that
`openrlhf.utils.images.read_picture` reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
from datasets import Dataset

from openrlhf.datasets.template_fields import PICTURE, Message
from openrlhf.utils.images import inner_value

TAG = "<image>"  # the placeholder of a picture in text, of rows with a column of pictures
PART_TYPES = ("image", "image_url", "input_image")


def is_picture(part: object) -> bool:
    """Return True for a content part that is a picture, or the placeholder of one."""
    return isinstance(part, Mapping) and part.get("type") in PART_TYPES


def values_in(value: object) -> list[Any]:
    """Return the value of each picture in message lists; None of a part that is a placeholder."""
    if isinstance(value, Mapping):
        if is_picture(value):
            return [inner_value(value)]
        keys = ("messages", "conversations", "content", "value")
        return [found for key in keys for found in values_in(value.get(key))]
    is_list = isinstance(value, (list, tuple))
    return [found for item in value for found in values_in(item)] if is_list else []  # type: ignore


def values_of(column: object) -> list[Any]:
    """Return the values in a column of one picture or of a list of them."""
    if column is None or column == "":
        return []
    values = column if isinstance(column, (list, tuple)) else [column]
    return [inner_value(value) for value in values]


def with_placeholders(
    messages: Sequence[Message], num_pictures: int, *, begins: bool
) -> list[Message]:
    """Return messages with a placeholder for each TAG in them, but in the assistant's, which may
    speak of it; where they begin a dialogue and have none, with all the pictures of their row
    before the first words of the user.
    """
    if any(PICTURE in str(message["content"]) for message in messages):
        return [*messages]
    placed = [
        {**each, "content": each["content"].replace(TAG, PICTURE)}
        if each["role"] != "assistant" and isinstance(each["content"], str)
        else each
        for each in messages
    ]
    asked = next((i for i, message in enumerate(placed) if message["role"] == "user"), None)
    has_placeholders = any(PICTURE in str(message["content"]) for message in placed)
    if begins and not has_placeholders and asked is not None:
        text = PICTURE * num_pictures + placed[asked]["content"]
        placed[asked] = {**placed[asked], "content": text}
    return placed


def undecoded(rows: Dataset, column: str) -> Dataset:
    """Return the rows with pictures of this column, or within it, as their files' bytes, which are
    then checked row by row.
    """
    head = column if column in rows.features else column.partition(".")[0]
    feature = _undecoded(rows.features[head])
    return rows if feature == rows.features[head] else rows.cast_column(head, feature)


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, datasets.List):
        return datasets.List(_undecoded(feature.feature))
    is_object = isinstance(feature, dict)
    return {k: _undecoded(v) for k, v in feature.items()} if is_object else feature
