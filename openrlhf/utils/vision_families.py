"""Families of vision-language models: all in which one differs from the others, in a class each.

A picture is read as rows of pixels: patches of its own size, or tiles of one size. Its one
placeholder becomes the ids that the family's own processor writes; those of them that are
placeholders again stand for the vectors that the tower makes of it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from openrlhf.errors import ConfigError

if TYPE_CHECKING:  # workers of reward functions read pictures, and nothing heavy
    from torch import Tensor

Size: TypeAlias = tuple[int, int]  # height and width of a picture
Inputs: TypeAlias = dict[str, "Tensor"]  # arguments of a model, by name
MAX_EDGE = 4096  # pixels, of a picture that Idefics3 cuts into tiles


class VisionFamily(ABC):
    """A family, for one model's config. `processor` is its image processor of transformers."""

    tower: ClassVar[tuple[str, ...]]  # modules with tower and projector
    placeholders: ClassVar[tuple[str, ...]] = ("image_token_id",)  # fields of the config
    has_grid_positions: ClassVar[bool] = False  # a token has a place in time, height and width
    writes_text: ClassVar[bool] = False  # around the placeholders, which a tokenizer reads
    engine_packages: ClassVar[tuple[str, ...]] = ("torchvision",)  # that vLLM imports

    def __init__(self, config: Any) -> None:
        self.config, self.image_token_id = config, config.image_token_id
        self.tokenizer: Any = None  # of one that writes text

    @abstractmethod
    def prepare(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
        """Set the limits of pixels of each picture; raise ConfigError for one that there is not."""

    def limits(self, processor: Any) -> dict[str, Any]:
        """Return the limits of pixels, by their names in its file."""
        return {"size": dict(processor.size)}

    @abstractmethod
    def num_tokens(self, processor: Any, size: Size) -> int:
        """Return the placeholders of a picture; raise ValueError for a shape that is not read."""

    def expansion(self, processor: Any, size: Size) -> list[int]:
        """Return the ids that a picture's one placeholder becomes; raises as `num_tokens` does."""
        return [self.image_token_id] * self.num_tokens(processor, size)

    @abstractmethod
    def pixels(
        self, processor: Any, found: Mapping[str, Any], sizes: Sequence[Size]
    ) -> tuple["Tensor", "Tensor"]:
        """Return the rows of pixels of I pictures that were processed, and their number in time,
        height and width, (I, 3) int64.
        """

    @abstractmethod
    def blank(self) -> tuple[list[int], list[int]]:
        """Return shape of the pixels and grid of a picture of one token."""

    @abstractmethod
    def inputs(self, pixels: "Tensor", grid: "Tensor", token_ids: "Tensor") -> Inputs:
        """Return the arguments of a model of transformers besides the ids, (R, T), of its rows."""

    @abstractmethod
    def engine_inputs(self, pixels: "Tensor", grid: "Tensor") -> tuple[Inputs, Inputs]:
        """Return the arguments of vLLM's model, (P, ...) for each row of pixels, and (I, ...) for
        each picture.
        """


class QwenVL(VisionFamily):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches, as many as a picture has."""

    tower = ("visual",)
    placeholders = ("image_token_id", "video_token_id")
    has_grid_positions = True

    def prepare(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
        if min_pixels is not None:
            processor.size["shortest_edge"] = min_pixels
        if max_pixels is not None:
            processor.size["longest_edge"] = max_pixels
        least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
        if (min_pixels or max_pixels) and least > most:
            raise ConfigError(
                f"Images would have at least {least} pixels and at most {most}. Type a smaller "
                "--image_min_pixels, or a larger --image_max_pixels."
            )

    def num_tokens(self, processor: Any, size: Size) -> int:
        num_patches = int(processor.get_number_of_image_patches(*size))
        return num_patches // int(processor.merge_size) ** 2

    def pixels(
        self, processor: Any, found: Mapping[str, Any], sizes: Sequence[Size]
    ) -> tuple["Tensor", "Tensor"]:
        return found["pixel_values"], found["image_grid_thw"]

    def blank(self) -> tuple[list[int], list[int]]:
        vision = self.config.vision_config
        side, channels = vision.spatial_merge_size, getattr(vision, "in_channels", 3)
        width = channels * vision.temporal_patch_size * vision.patch_size**2
        return [side**2, width], [1, side, side]

    def inputs(self, pixels: "Tensor", grid: "Tensor", token_ids: "Tensor") -> Inputs:
        kinds = (token_ids == self.image_token_id).int()
        return {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}

    def engine_inputs(self, pixels: "Tensor", grid: "Tensor") -> tuple[Inputs, Inputs]:
        return {"pixel_values": pixels}, {"image_grid_thw": grid}


class TiledVL(VisionFamily):
    """A family that cuts pictures into square tiles, each of as many tokens."""

    writes_text = True
    patch: int  # pixels of a side
    merge: int  # patches of a side that become one token
    tile: int  # pixels of a side

    def prepare(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
        if min_pixels is not None:
            raise ConfigError(
                f"--image_min_pixels: the family {self.config.model_type} cuts images into tiles "
                "of one size, and has no such limit. Leave it out."
            )

    @property
    def tokens_of_tile(self) -> int:
        """Return the placeholders of each tile."""
        return (self.tile // self.patch // self.merge) ** 2

    @abstractmethod
    def num_tiles(self, processor: Any, size: Size) -> int:
        """Return the tiles of a picture."""

    def num_tokens(self, processor: Any, size: Size) -> int:
        return self.num_tiles(processor, size) * self.tokens_of_tile

    def expansion(self, processor: Any, size: Size) -> list[int]:
        tile = self.tokenizer.convert_ids_to_tokens(self.image_token_id) * self.tokens_of_tile
        text = self.text_of(processor, size, tile)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @abstractmethod
    def text_of(self, processor: Any, size: Size, tile: str) -> str:
        """Return the text of a picture; `tile` is that of the placeholders of a tile."""

    def pixels(
        self, processor: Any, found: Mapping[str, Any], sizes: Sequence[Size]
    ) -> tuple["Tensor", "Tensor"]:
        import torch  # noqa: PLC0415 - see above

        tiles = found["pixel_values"]
        grid = torch.tensor([[self.num_tiles(processor, size), 1, 1] for size in sizes])
        return tiles.reshape(-1, *tiles.shape[-3:]), grid

    def blank(self) -> tuple[list[int], list[int]]:
        side = self.merge * self.patch
        return [1, self.config.vision_config.num_channels, side, side], [1, 1, 1]


class InternVL(TiledVL):
    """InternVL in the form of transformers."""

    tower = ("vision_tower", "multi_modal_projector")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        vision = config.vision_config
        self.patch, self.tile = vision.patch_size[0], vision.image_size[0]
        self.merge = round(1 / config.downsample_ratio)

    def prepare(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
        super().prepare(processor, min_pixels, max_pixels)
        processor.crop_to_patches = True  # as InternVLProcessor does, whatever the file says
        if max_pixels is not None:
            processor.max_patches = max(1, max_pixels // self.tile**2)

    def limits(self, processor: Any) -> dict[str, Any]:
        return {"crop_to_patches": True, "max_patches": processor.max_patches}

    def num_tiles(self, processor: Any, size: Size) -> int:
        return int(processor.get_number_of_image_patches(*size))

    def text_of(self, processor: Any, size: Size, tile: str) -> str:
        inside = tile * self.num_tiles(processor, size)
        return f"{self.tokenizer.start_image_token}{inside}{self.tokenizer.end_image_token}"

    def inputs(self, pixels: "Tensor", grid: "Tensor", token_ids: "Tensor") -> Inputs:
        return {"pixel_values": pixels}

    def engine_inputs(self, pixels: "Tensor", grid: "Tensor") -> tuple[Inputs, Inputs]:
        num_tiles_I = grid.prod(-1)
        ids_I = num_tiles_I.new_full(num_tiles_I.shape, self.image_token_id)
        by_picture = {"image_num_patches": num_tiles_I, "image_token_id": ids_I}
        return {"pixel_values": pixels}, by_picture


class Idefics3(TiledVL):
    """Idefics3; tiles in rows, and the whole picture behind them."""

    tower = ("vision_model", "connector")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        vision = config.vision_config
        self.patch, self.tile = vision.patch_size, vision.image_size
        self.merge = config.scale_factor

    def prepare(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
        super().prepare(processor, min_pixels, max_pixels)
        if max_pixels is not None:
            edge = min(math.isqrt(max_pixels), MAX_EDGE) // self.tile * self.tile
            processor.size["longest_edge"] = max(edge, self.tile)
        longest, tile = processor.size["longest_edge"], processor.max_image_size["longest_edge"]
        whole = min(longest, MAX_EDGE) // tile * tile
        if processor.do_image_splitting and longest != whole:
            raise ConfigError(
                f"preprocessor_config.json: the longest_edge of size is {longest}, not a multiple "
                f"of the {tile} pixels of a tile up to {MAX_EDGE}, so that the number of tiles is "
                f"not known before an image is cut. Write {whole}."
            )

    def _tiles(self, processor: Any, size: Size) -> tuple[int, int]:
        """Return the rows and columns of tiles; 0 for a picture that is not cut."""
        _, rows, columns = processor.get_number_of_image_patches(*size)
        return rows, columns

    def num_tiles(self, processor: Any, size: Size) -> int:
        rows, columns = self._tiles(processor, size)
        return rows * columns + 1

    def text_of(self, processor: Any, size: Size, tile: str) -> str:
        around = getattr(self.tokenizer, "fake_image_token", "<fake_token_around_image>")
        whole = getattr(self.tokenizer, "global_image_token", "<global-img>")
        rows, columns = self._tiles(processor, size)
        lines = (
            "".join(f"{around}<row_{i + 1}_col_{k + 1}>{tile}" for k in range(columns)) + "\n"
            for i in range(rows)
        )
        gap = "\n" if rows else ""
        return f"{''.join(lines)}{gap}{around}{whole}{tile}{around}"

    def inputs(self, pixels: "Tensor", grid: "Tensor", token_ids: "Tensor") -> Inputs:
        return {"pixel_values": pixels[None]}

    def engine_inputs(self, pixels: "Tensor", grid: "Tensor") -> tuple[Inputs, Inputs]:
        is_pixel = pixels.new_ones(len(pixels), *pixels.shape[-2:]).bool()  # a tile has no margin
        by_row = {"pixel_values": pixels, "pixel_attention_mask": is_pixel}
        return by_row, {"num_patches": grid.prod(-1)}


class SmolVLM(Idefics3):
    """SmolVLM and SmolVLM2."""

    engine_packages = ("torchvision", "num2words")


# By `model_type` of a config.
FAMILIES: dict[str, type[VisionFamily]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), QwenVL),
    "internvl": InternVL,
    "idefics3": Idefics3,
    "smolvlm": SmolVLM,
}


def family_of(config: Any) -> VisionFamily:
    """Return the family of a model that reads pictures, by its config."""
    return FAMILIES[config.model_type](config)


def tower_of(config: Any) -> tuple[str, ...]:
    """Return the modules with tower and projector of a model; none of a model of texts."""
    family = FAMILIES.get(config.model_type)
    return () if family is None else family.tower
