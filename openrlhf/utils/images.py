"""Pictures: encoded files as they travel, and the pixels and tokens that a model reads of them.

Encoded bytes are all that data sets, rollouts and Ray carry; pixels are made where a row is packed
or an engine is asked. Knows the image processor of a model's folder, and nothing of its layers.
"""

import base64
import binascii
import hashlib
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from PIL import Image, ImageOps, UnidentifiedImageError

from openrlhf.errors import ConfigError, first_line
from openrlhf.utils.adapter_folder import base_of_adapter

if TYPE_CHECKING:  # workers of reward functions read pictures, and nothing heavy
    import torch
    from torch import Tensor

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # of files; none runs a program
# Families whose pictures are packed, and the tokens that stand for pixels in their config.
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# Added to the logits of these, in engines and in the trainer alike: no temperature brings one back,
# half precision holds it, and unlike -inf it leaves entropies finite.
BANNED_LOGIT = -3e4
PLACEHOLDERS = ("image_token_id", "video_token_id")
PROCESSOR_FILES = ("preprocessor_config", "video_preprocessor_config", "processor_config")
PNG_START = b"\x89PNG\r\n\x1a\n"
MAX_PATH = 4096  # characters: a longer text is no path


class PictureError(ValueError):
    """A picture cannot be read; the message says why, the caller knows whose it is."""


@dataclass(frozen=True)
class Picture:
    """An encoded picture; width and height in pixels, as a person sees it.

    Example: `Picture(b"\\x89PNG...", "9f86d0...", 28, 28)`
    """

    data: bytes
    sha256: str
    width: int
    height: int

    def open(self) -> Image.Image:
        """Return the picture, decoded to RGB and turned as its EXIF data say."""
        return _decoded(self.data)

    def as_png(self) -> bytes:
        """Return a PNG file with the same pixels."""
        return self.data if self.data.startswith(PNG_START) else _png(self.open())

    def data_url(self, max_side: int | None = None) -> str:
        """Return the picture in a URL, with the same pixels, or no side longer than `max_side`."""
        data = self.as_png()
        if max_side is not None:
            image = self.open()
            image.thumbnail((max_side, max_side))
            data = _png(image)
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def write_pictures(folder: Path, pictures: Iterable[Picture]) -> None:
    """Write each picture once, as `<sha256>.png`; raises OSError."""
    for sha256, picture in {picture.sha256: picture for picture in pictures}.items():
        path = folder / f"{sha256}.png"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".partial")
            unfinished.write_bytes(picture.as_png())
            unfinished.replace(path)


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _as_seen(image: Image.Image) -> Image.Image:
    """Return an image in RGB, turned as its EXIF data say."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits of gray, which Pillow would cut off at 255
        image = image.convert("I").point(lambda value: value * (1 / 256))
    return image.convert("RGB")


def _decoded(data: bytes) -> Image.Image:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return _as_seen(image)
    except UnidentifiedImageError as error:
        raise PictureError(f"no image in {', '.join(FORMATS)} format") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise PictureError(f"an image that cannot be decoded: {first_line(error)}") from error


def read_picture(value: object, *, folder: Path | None = None, allow_paths: bool = True) -> Picture:
    """Return the picture that a path, encoded bytes, base64 text, a data URL, an image of Pillow or
    {"bytes", "path"} holds; raise PictureError for anything else.

    A path is looked for in `folder`, then in the current one. Without `allow_paths` no file of this
    machine is read.
    """
    data = _encoded(value, folder, allow_paths)
    image = _decoded(data)
    return Picture(data, hashlib.sha256(data).hexdigest(), *image.size)


def file_of(value: object, folder: Path | None = None) -> Path | None:
    """Return the file that a value names, if there is one."""
    if isinstance(value, Mapping) and not value.get("bytes"):
        value = value.get("path")
    if not isinstance(value, (str, Path)) or len(str(value)) > MAX_PATH:
        return None
    path = Path(str(value).removeprefix("file://")).expanduser()
    places = (path,) if folder is None else (folder / path, path)
    return next(
        (place for place in places if os.path.isfile(place)), None
    )  # no error at a long name


def _encoded(value: object, folder: Path | None, allow_paths: bool) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, Image.Image):
        return _png(_as_seen(value))
    if allow_paths and (path := file_of(value, folder)) is not None:
        try:
            return path.read_bytes()
        except OSError as error:
            raise PictureError(f"{path}: {error.strerror}") from error
    if isinstance(value, Mapping):
        return _encoded(value.get("bytes") or value.get("path"), folder, allow_paths)
    if isinstance(value, Path):
        raise PictureError("there is no such file")
    if not isinstance(value, str):
        raise PictureError(f"{type(value).__name__} instead of an image")
    if value.startswith(("http://", "https://")):
        raise PictureError(f"{value[:80]} is a URL: images are not fetched. Give a file")
    text = value.partition(",")[2] if value.startswith("data:") else value
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        kind = "neither a file nor base64" if allow_paths else "no base64"
        raise PictureError(f"{value[:80]!r} is {kind}") from error


def placeholders_of(config: Any) -> tuple[int, ...]:
    """Return the tokens that stand for pixels, by a model's config; none of a model of texts."""
    return tuple(getattr(config, name) for name in PLACEHOLDERS) if is_vision(config) else ()


def is_vision(config: Any) -> bool:
    """Return True for the config of a family whose pictures are read."""
    return config.model_type in VISION_FAMILIES


def processor_files(config: Any) -> list[str]:
    """Return the files of the processors of a model that reads pictures, by its config."""
    from transformers.utils.hub import cached_file  # noqa: PLC0415 - see ImageProcessor

    if not is_vision(config):
        return []
    path, may_lack = config._name_or_path, {"_raise_exceptions_for_missing_entries": False}
    files = (cached_file(path, f"{name}.json", **may_lack) for name in PROCESSOR_FILES)
    return [file for file in files if file is not None]


@dataclass(frozen=True)
class Images:
    """Pixels of I pictures, in P patches of D numbers in all.

    Example: of one picture of 28x28 pixels in patches of 14, `pixels` is (4, 1176) and `grid`
    [[1, 2, 2]].
    """

    pixels: "Tensor"  # (P, D)
    grid: "Tensor"  # (I, 3) int64: patches in time, height and width of each picture

    @classmethod
    def concat(cls, parts: Iterable["Images"]) -> "Images":
        """Return the pictures of all parts, in order."""
        import torch  # noqa: PLC0415 - see above

        pixels, grids = zip(*((part.pixels, part.grid) for part in parts), strict=True)
        return cls(torch.cat(pixels), torch.cat(grids))

    def to(self, device: "torch.device | str") -> Self:
        """Return the same pictures on another device."""
        return replace(self, pixels=self.pixels.to(device), grid=self.grid.to(device))


class ImageProcessor:
    """The image processor of a model's folder, and the tokens that stand for pixels."""

    def __init__(self, processor: Any, image_token_id: int, banned: Sequence[int]) -> None:
        self._processor = processor
        self.image_token_id = image_token_id
        self.banned_token_ids = tuple(banned)  # a sampled one would have no pixels
        self.merge = int(processor.merge_size)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        trust_remote_code: bool = False,
    ) -> "ImageProcessor":
        """Load the processor of a model's folder or hub name, or of an adapter's base, with other
        limits of pixels for each picture; raise ConfigError where it has none.
        """
        while (base := base_of_adapter(path)) is not None:
            path = base
        import transformers  # noqa: PLC0415 - samples hold pictures, and are used where it is not

        options = {"trust_remote_code": trust_remote_code}
        try:
            config = transformers.AutoConfig.from_pretrained(path, **options)
            # Pillow's: both kinds give the same pixels, this one needs no torchvision.
            processor = transformers.AutoImageProcessor.from_pretrained(
                path, backend="pil", **options
            )
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"The image processor of {path!r} cannot be read: {first_line(error)} Copy "
                "preprocessor_config.json of the model into its folder."
            ) from error
        if min_pixels is not None:
            processor.size["shortest_edge"] = min_pixels
        if max_pixels is not None:
            processor.size["longest_edge"] = max_pixels
        if min_pixels or max_pixels:
            least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
            if least > most:
                raise ConfigError(
                    f"Images would have at least {least} pixels and at most {most}. Type a smaller "
                    "--image_min_pixels, or a larger --image_max_pixels."
                )
        return cls(processor, config.image_token_id, placeholders_of(config))

    @property
    def description(self) -> str:
        """Return all that decides the tokens of a picture."""
        return f"{self._processor.to_json_string()} {self.image_token_id}"

    def run_lengths(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Return the length of the run of each id in the expanded ids, of a placeholder that of its
        picture; raise PictureError unless there is one placeholder for each, with tokens between.
        """
        pad = self.image_token_id
        if any(pair == (pad, pad) for pair in pairwise(token_ids)):
            raise PictureError("two places for images without a token between them")
        num_places = sum(token_id == self.image_token_id for token_id in token_ids)
        if num_places != len(pictures):
            raise PictureError(f"images: {len(pictures)}, and places for them: {num_places}")
        left = iter(pictures)
        return [
            self.num_tokens(next(left)) if token_id == self.image_token_id else 1
            for token_id in token_ids
        ]

    def num_patches(self, picture: Picture) -> int:
        """Return the number of patches that the tower reads of a picture; raise PictureError for a
        shape that it does not read.
        """
        try:
            return int(self._processor.get_number_of_image_patches(picture.height, picture.width))
        except ValueError as error:  # one that is far too narrow
            size = f"{picture.width}x{picture.height}"
            raise PictureError(f"an image of {size} pixels: {first_line(error)}") from error

    def num_tokens(self, picture: Picture) -> int:
        """Return the number of tokens that the language model reads of a picture."""
        return self.num_patches(picture) // self.merge**2

    def expand(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Return the ids with as many placeholders for each picture as it has tokens, instead of
        one; raise PictureError unless there is one placeholder for each.
        """
        lengths = self.run_lengths(token_ids, pictures)
        return [i for i, n in zip(token_ids, lengths, strict=True) for _ in range(n)]

    def pixels(self, pictures: Sequence[Picture]) -> Images:
        """Return the pixels that a model reads of one or more pictures, in float32; one that comes
        several times is processed once.
        """
        distinct = {picture.sha256: picture for picture in pictures}
        files = [picture.open() for picture in distinct.values()]
        found = self._processor(images=files, return_tensors="pt")
        pixels, grid = found["pixel_values"].float(), found["image_grid_thw"]
        places = {sha256: place for place, sha256 in enumerate(distinct)}
        order = [places[picture.sha256] for picture in pictures]
        parts = pixels.split(grid.prod(-1).tolist())
        return Images.concat(Images(parts[place], grid[place, None]) for place in order)

    @property
    def logit_bias(self) -> dict[int, float]:
        """Return the numbers that are added to logits, by token: no placeholder is ever sampled."""
        return dict.fromkeys(self.banned_token_ids, BANNED_LOGIT)

    def runs(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> list[tuple[int, int]]:
        """Return the first place of each picture in expanded ids, and its number of tokens; raise
        PictureError where the ids have places for others.
        """
        found, start = [], 0
        for token_id, same in groupby(token_ids):
            size = len([*same])
            found += [(start, size)] if token_id == self.image_token_id else []
            start += size
        places, sizes = [size for _, size in found], [self.num_tokens(each) for each in pictures]
        if places != sizes:
            raise PictureError(f"{places} places for images of {sizes} tokens")
        return found
