"""Pictures: encoded files as they travel, and the pixels and tokens that a model reads of them.

Encoded bytes are all that data sets, rollouts and Ray carry; pixels are made where a row is packed
or an engine is asked. Knows the image processor of a model's folder, and nothing of its layers.
"""

import base64
import binascii
import hashlib
import io
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from PIL import Image, ImageOps, UnidentifiedImageError

from openrlhf.errors import ConfigError, first_line
from openrlhf.utils.adapter_folder import whole_model
from openrlhf.utils.vision_families import FAMILIES, Size, VisionFamily, family_of

if TYPE_CHECKING:  # workers of reward functions read pictures, and nothing heavy
    import torch
    from torch import Tensor

Measure = TypeVar("Measure")
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # of files; none runs a program
# Added to the logits of these, in engines and in the trainer alike: no temperature brings one back,
# half precision holds it, and unlike -inf it leaves entropies finite.
BANNED_LOGIT = -3e4
PROCESSOR_FILES = ("preprocessor_config", "video_preprocessor_config", "processor_config")
# What Pillow raises for files that are damaged.
DAMAGE = (
    *(OSError, SyntaxError, ValueError, IndexError, struct.error),
    Image.DecompressionBombError,
)
PNG_START = b"\x89PNG\r\n\x1a\n"
KEYS = ("bytes", "image", "image_url", "url", "path", "base64")  # of an object with a picture
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

    @property
    def has_more_frames(self) -> bool:
        """Return True if frames follow the first, which is all that is read; a photo's preview
        behind it is none.
        """
        with Image.open(io.BytesIO(self.data), formats=FORMATS) as image:
            try:
                return image.format != "MPO" and getattr(image, "is_animated", False)
            except DAMAGE:  # of one behind the first
                return True

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
    """Return an image in RGB, turned as its EXIF data say, on white where it is transparent: so
    does vLLM. Raise PictureError for numbers without a scale.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode in ("F", "I"):  # whole numbers that 8 bits hold are taken to be 8 bits
        least, most = cast(tuple[float, float], image.getextrema())
        if image.mode == "F" or least < 0 or most > 255:
            told = f"numbers from {least:g} to {most:g} have no scale"
            raise PictureError(f"{told}, save it with 8 or 16 bits")
    if image.mode.startswith("I;16"):  # of gray, which Pillow would cut off at 255
        image = image.convert("I").point(lambda value: value * (1 / 256))
        image.info.pop("transparency", None)  # a number of the old scale
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def _decoded(image: bytes | Image.Image) -> Image.Image:
    """Return an encoded image, or one that Pillow may not have read yet, as it is seen."""
    try:
        if isinstance(image, Image.Image):
            return _as_seen(image)
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            return _as_seen(opened)
    except UnidentifiedImageError as error:
        raise PictureError(f"no image in {', '.join(FORMATS)} format") from error
    except DAMAGE as error:
        raise PictureError(f"an image that cannot be decoded: {first_line(error)}") from error


def read_picture(value: object, *, folder: Path | None = None, allow_paths: bool = True) -> Picture:
    """Return the picture that a path, encoded bytes, base64 text, a data URL, an image of Pillow or
    an object with one of these holds; raise PictureError for anything else.

    A path is looked for in `folder`, then in the current one. Without `allow_paths` no file of this
    machine is read.
    """
    data = _encoded(inner_value(value), folder, allow_paths)
    image = _decoded(data)
    return Picture(data, hashlib.sha256(data).hexdigest(), *image.size)


def inner_value(value: Any) -> Any:
    """Return the value of a picture that an object holds, as a content part or the `Image` column
    of a hub data set does, or None; any other value as it is.
    """
    if not isinstance(value, Mapping):
        return value
    return inner_value(next((value[key] for key in KEYS if value.get(key) is not None), None))


def file_of(value: object, folder: Path | None = None) -> Path | None:
    """Return the file that a value names, if there is one."""
    if not isinstance(value, (str, Path)) or len(str(value)) > MAX_PATH:
        return None
    path = Path(str(value).removeprefix("file://")).expanduser()
    paths = (path,) if folder is None else (folder / path, path)
    return next((path for path in paths if os.path.isfile(path)), None)  # no error at a long name


def _encoded(value: object, folder: Path | None, allow_paths: bool) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, Image.Image):
        return _png(_decoded(value))
    if allow_paths and (path := file_of(value, folder)) is not None:
        try:
            return path.read_bytes()
        except OSError as error:
            raise PictureError(f"{path}: {error.strerror}") from error
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
    if not is_vision(config):
        return ()
    return tuple(getattr(config, name) for name in FAMILIES[config.model_type].placeholders)


def is_vision(config: Any) -> bool:
    """Return True for the config of a family whose pictures are read."""
    return config.model_type in FAMILIES


def processor_files(config: Any) -> list[str]:
    """Return the files of the processors of a model that reads pictures, by its config."""
    from transformers.utils.hub import cached_file  # noqa: PLC0415 - see ImageProcessor

    if not is_vision(config):
        return []
    path = whole_model(config._name_or_path)
    may_lack = {"_raise_exceptions_for_missing_entries": False}
    files = (cached_file(path, f"{name}.json", **may_lack) for name in PROCESSOR_FILES)
    return [file for file in files if file is not None]


@dataclass(frozen=True)
class Images:
    """Pixels of I pictures, in P rows in all: patches of D numbers, or tiles of (3, H, W).

    Example: of one picture of 28x28 pixels in patches of 14, `pixels` is (4, 1176) and `grid`
    [[1, 2, 2]]; of one in five tiles, the grid is [[5, 1, 1]].
    """

    pixels: "Tensor"  # (P, D) or (P, 3, H, W)
    grid: "Tensor"  # (I, 3) int64: rows of each picture, by time, height and width

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

    def __init__(self, processor: Any, family: VisionFamily) -> None:
        self._processor, self.family = processor, family
        self.image_token_id = family.image_token_id
        self.banned_token_ids = placeholders_of(family.config)  # one would have no pixels

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
        path = whole_model(path)
        import transformers  # noqa: PLC0415 - samples hold pictures, and are used where it is not

        options = {"trust_remote_code": trust_remote_code}
        try:
            config = transformers.AutoConfig.from_pretrained(path, **options)
            # Pillow's: both kinds give the same pixels, this one needs no torchvision.
            processor = transformers.AutoImageProcessor.from_pretrained(
                path, backend="pil", **options
            )
            family = family_of(config)
            if family.writes_text:
                family.tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"The image processor of {path!r} cannot be read: {first_line(error)} Copy "
                "preprocessor_config.json of the model into its folder."
            ) from error
        family.prepare(processor, min_pixels, max_pixels)
        return cls(processor, family)

    @property
    def description(self) -> str:
        """Return all that decides the tokens of a picture."""
        return f"{self._processor.to_json_string()} {self.family.config.to_json_string()}"

    @property
    def limits(self) -> dict[str, Any]:
        """Return the limits of pixels, by their names in the processor's file."""
        return self.family.limits(self._processor)

    def expansions(
        self, token_ids: Sequence[int], pictures: Sequence[Picture]
    ) -> list[Sequence[int]]:
        """Return the ids that each id becomes, a placeholder those of its picture; raise
        PictureError unless there is one placeholder for each, which some families need tokens
        between.
        """
        pad = self.image_token_id
        if not self.family.writes_text and (pad, pad) in pairwise(token_ids):
            raise PictureError("two places for images without a token between them")
        num_placeholders = sum(token_id == pad for token_id in token_ids)
        if num_placeholders != len(pictures):
            raise PictureError(f"images: {len(pictures)}, and places for them: {num_placeholders}")
        left = iter(pictures)
        return [
            self._expansion(next(left)) if token_id == pad else [token_id] for token_id in token_ids
        ]

    def _expansion(self, picture: Picture) -> list[int]:
        return self._measured(picture, self.family.expansion)

    def _measured(self, picture: Picture, measure: Callable[[Any, Size], Measure]) -> Measure:
        try:
            return measure(self._processor, (picture.height, picture.width))
        except ValueError as error:  # one that is far too narrow
            size = f"{picture.width}x{picture.height}"
            raise PictureError(f"an image of {size} pixels: {first_line(error)}") from error

    def num_tokens(self, picture: Picture) -> int:
        """Return the number of vectors that the language model reads of a picture; raise
        PictureError for a shape that its tower does not read.
        """
        return self._measured(picture, self.family.num_tokens)

    def expand(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Return the ids with those of each picture instead of its placeholder; raise PictureError
        unless there is one placeholder for each.
        """
        return [each for part in self.expansions(token_ids, pictures) for each in part]

    def pixels(self, pictures: Sequence[Picture]) -> Images:
        """Return the pixels that a model reads of one or more pictures, in float32; one that comes
        several times is processed once.
        """
        distinct = {picture.sha256: picture for picture in pictures}
        files = [picture.open() for picture in distinct.values()]
        found = self._processor(images=files, return_tensors="pt")
        sizes = [(picture.height, picture.width) for picture in distinct.values()]
        pixels, grid = self.family.pixels(self._processor, found, sizes)
        parts = map(Images, pixels.float().split(grid.prod(-1).tolist()), grid[:, None])
        made = dict(zip(distinct, parts, strict=True))
        return Images.concat(made[picture.sha256] for picture in pictures)

    @property
    def logit_bias(self) -> dict[int, float]:
        """Return the numbers that are added to logits, by token: no placeholder is ever sampled."""
        return dict.fromkeys(self.banned_token_ids, BANNED_LOGIT)

    def placeholders(
        self, token_ids: Sequence[int], pictures: Sequence[Picture]
    ) -> list[list[int]]:
        """Return the positions of each picture's placeholders in expanded ids; raise PictureError
        where the ids have those of others.
        """
        ids, pad, found, end = [*token_ids], self.image_token_id, list[list[int]](), 0
        for part in map(self._expansion, pictures):
            first = ids.index(pad, end) if pad in ids[end:] else 0
            start = first - part.index(pad)
            end = start + len(part)
            if ids[max(start, 0) : end] != part or ids[end : end + 1] == [pad]:
                break
            found.append([k for k in range(start, end) if ids[k] == pad])
        if len(found) < len(pictures) or pad in ids[end:]:
            sizes = [self.num_tokens(picture) for picture in pictures]
            raise PictureError(f"{ids.count(pad)} places for images of {sizes} tokens, or others")
        return found

    def inputs(self, pictures: Sequence[Picture], token_ids: "Tensor") -> dict[str, "Tensor"]:
        """Return the arguments of `generate` for the pictures of all rows of ids, (R, T)."""
        if not pictures:
            return {}
        images = self.pixels(pictures).to(token_ids.device)
        return self.family.inputs(images.pixels, images.grid, token_ids)
