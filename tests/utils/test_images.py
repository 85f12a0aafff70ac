"""Pictures from all the forms of a row, and the tokens and pixels of them."""

import base64
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from openrlhf.errors import ConfigError
from openrlhf.utils.images import ImageProcessor, Images, PictureError, read_picture
from tests.helpers import tiny_vision


def encoded(image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_vision.make("qwen2_5_vl", tmp_path_factory.mktemp("vision")))


def test_every_form_of_a_picture_gives_the_same(tmp_path):
    image = tiny_vision.noise(28, 56)
    data = encoded(image)
    (tmp_path / "a.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    forms = [data, image, str(tmp_path / "a.png"), text, f"data:image/png;base64,{text}"]
    forms += [{"bytes": data, "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}]
    for form in forms:
        picture = read_picture(form)
        assert (picture.width, picture.height) == (56, 28)
        assert picture.open().tobytes() == image.tobytes()
    assert pickle.loads(pickle.dumps(picture)) == picture


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_sixteen_bits_of_gray_are_scaled(suffix):
    """Of each number the higher eight bits are seen, as of pictures with colours."""
    rows, file = np.array([[0, 255, 256, 32768, 65535]], dtype="uint16"), io.BytesIO()
    gray = Image.fromarray(rows)
    gray.save(file, format=suffix)
    for value in (gray, file.getvalue()):
        red, green, _ = read_picture(value).open().split()
        assert red.tobytes() == green.tobytes() == bytes([0, 0, 1, 128, 255])


def test_eight_bits_of_gray_as_whole_numbers_are_what_they_are():
    """As `datasets` stores an array of integers."""
    gray = Image.fromarray(np.array([[0, 100, 255]], dtype="int32"))
    assert gray.mode == "I"
    assert read_picture(gray).open().split()[0].tobytes() == bytes([0, 100, 255])


@pytest.mark.parametrize(("least", "most"), [(0, 300), (-1, 100)])
def test_other_whole_numbers_have_no_scale(least, most):
    with pytest.raises(PictureError, match=f"numbers from {least} to {most} have no scale"):
        read_picture(Image.fromarray(np.array([[least, 100, most]], dtype="int32")))


def test_an_image_that_is_given_is_turned_as_its_exif_data_say():
    image = Image.new("RGB", (4, 2))
    image.getexif()[0x0112] = 6  # the top of the scene is at its right
    picture = read_picture(image)
    assert (picture.width, picture.height) == picture.open().size == (2, 4)


def test_base64_may_have_line_breaks():
    data = encoded(tiny_vision.noise(28, 28))
    for text in (base64.encodebytes(data).decode(), base64.b64encode(data).decode() + "\n"):
        assert read_picture(text).data == read_picture(f"data:image/png;base64,{text}").data == data


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode):
    """As a plot of black lines that is saved without a background."""
    image = Image.new("RGBA", (3, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    seen = read_picture(encoded(image.convert(mode))).open()
    assert [seen.getpixel((x, 0)) for x in range(3)] == [(255,) * 3, (0,) * 3, (255,) * 3]


def test_floats_have_no_scale():
    with pytest.raises(PictureError, match="numbers from 0 to 1 have no scale"):
        read_picture(Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype="float32")))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("/nowhere/a.png", "neither a file nor base64"),
        ("https://example.org/a.png", "images are not fetched"),
        (b"GIF89a", "cannot be decoded|no image"),
        (encoded(tiny_vision.noise(28, 28))[:-600], "cannot be decoded: .*truncated"),
        (None, "NoneType instead of an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image in BMP"),
    ],
)
def test_what_is_no_picture_is_refused_in_words(value, words):
    with pytest.raises(PictureError, match=words):
        read_picture(value)


def test_an_image_of_pillow_that_is_torn_is_refused_in_words():
    """Pillow reads it only when it is asked for pixels."""
    torn = Image.open(io.BytesIO(encoded(tiny_vision.noise(28, 28))[:-600]))
    with pytest.raises(PictureError, match=r"cannot be decoded: .*truncated"):
        read_picture(torn)


def test_a_transparent_number_of_sixteen_bits_of_gray_has_no_effect():
    """Scaled, another number would be transparent."""
    file = io.BytesIO()
    gray = Image.fromarray(np.array([[0, 256, 65535]], dtype="uint16"))
    gray.save(file, format="png", transparency=1)
    red, *_ = read_picture(file.getvalue()).open().split()
    assert red.tobytes() == bytes([0, 1, 255])


def test_no_file_is_read_where_paths_are_not_allowed(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(tiny_vision.noise(28, 28)))
    with pytest.raises(PictureError, match="is no base64"):
        read_picture(str(tmp_path / "a.png"), allow_paths=False)


def test_a_placeholder_becomes_as_many_as_the_picture_has_tokens(folder):
    """In patches of 14, merged by four: 28x28 is 1 token, 56x84 is 6."""
    processor = ImageProcessor.load(folder)
    small, large = (read_picture(tiny_vision.noise(*size)) for size in ((28, 28), (56, 84)))
    pad = processor.image_token_id
    assert processor.expand([5, pad, 6, pad], [large, small]) == [5, *[pad] * 6, 6, pad]
    found = processor.pixels([large, small])
    assert found.grid.tolist() == [[1, 4, 6], [1, 2, 2]]
    assert found.pixels.shape == (28, 3 * 2 * 14 * 14)
    joined = Images.concat([processor.pixels([large]), processor.pixels([small])])
    assert torch.equal(joined.pixels, found.pixels)
    with pytest.raises(PictureError, match="images: 2, and places for them: 1"):
        processor.expand([5, pad], [large, small])


def test_limits_of_pixels_change_the_number_of_tokens(folder):
    """2x2 tokens of 28x28 pixels at most, or 4x4 at least."""
    picture = read_picture(tiny_vision.noise(84, 84))
    fewer = ImageProcessor.load(folder, max_pixels=4 * 28 * 28)
    more = ImageProcessor.load(folder, min_pixels=16 * 28 * 28)
    assert (fewer.num_tokens(picture), more.num_tokens(picture)) == (4, 16)
    assert fewer.pixels([picture]).grid.tolist() == [[1, 4, 4]]


@pytest.mark.parametrize(
    "limits", [{"min_pixels": 900, "max_pixels": 800}, {"min_pixels": 10**9}, {"max_pixels": 9}]
)
def test_limits_of_pixels_that_no_image_meets_are_refused(folder, limits):
    """Those that are not typed are in the model's folder."""
    with pytest.raises(ConfigError, match=r"at least .* pixels and at most .* --image_min_pixels"):
        ImageProcessor.load(folder, **limits)


@pytest.mark.parametrize("ids", [[8, 8, 8], [5, 8, 6, 8], [8, 8, 5, 8, 8], [8, 5, 8, 8, 6, 8]])
def test_runs_of_placeholders_are_those_of_the_pictures(folder, ids):
    """Two pictures of one token and of two have a run each."""
    processor = ImageProcessor.load(folder)
    pictures = [read_picture(tiny_vision.noise(28, 28 * size)) for size in (1, 2)]
    assert processor.placeholders([8, 5, 8, 8], pictures) == [[0], [2, 3]]
    with pytest.raises(PictureError, match="places for images"):
        processor.placeholders(ids, pictures)


@pytest.mark.parametrize("kind", ["internvl", "idefics3"])
def test_marks_between_placeholders_are_those_of_the_pictures(kind, tmp_path):
    """Two pictures side by side, of five tiles each."""
    processor = ImageProcessor.load(str(tiny_vision.make(kind, tmp_path)))
    pictures = [read_picture(tiny_vision.noise(112, 112))] * 2
    ids = processor.expand([5, 8, 8, 6], pictures)
    first, second = processor.placeholders(ids, pictures)
    assert len(first) == len(second) == 20 and first[-1] < second[0]
    assert [k for k, token_id in enumerate(ids) if token_id == 8] == [*first, *second]
    for others in ([*ids[: first[0]], *ids[first[0] + 1 :]], ids[2:], [*ids, 8], ids[:-9]):
        with pytest.raises(PictureError, match="places for images"):
            processor.placeholders(others, pictures)


@pytest.mark.parametrize("kind", ["internvl", "idefics3", "smolvlm"])
def test_a_limit_of_pixels_is_one_of_tiles_where_a_family_has_them(kind, tmp_path):
    """112x112 pixels are 2x2 tiles and the whole in one, of four tokens each."""
    folder = str(tiny_vision.make(kind, tmp_path))
    picture = read_picture(tiny_vision.noise(112, 112))
    fewer = ImageProcessor.load(folder, max_pixels=112 * 112 - 1)
    assert (ImageProcessor.load(folder).num_tokens(picture), fewer.num_tokens(picture)) in (
        (20, 4),
        (20, 16),  # InternVL has other shapes: 3x1 tiles
    )
    assert len(fewer.pixels([picture]).pixels) == fewer.num_tokens(picture) // 4
    with pytest.raises(ConfigError, match=rf"--image_min_pixels: the family {kind} cuts images"):
        ImageProcessor.load(folder, min_pixels=56 * 56)


@pytest.mark.parametrize(("edge", "instead"), [(120, 112), (74 * 56, 73 * 56)])
def test_a_size_that_is_no_multiple_of_the_tiles_is_refused(tmp_path, edge, instead):
    """The image processor of Transformers would count other tiles than it cuts, and scales to 4096
    pixels in between.
    """
    file = tiny_vision.make("idefics3", tmp_path) / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"longest_edge": 112', f'"longest_edge": {edge}'))
    told = rf"size is {edge}, not a multiple of the 56 .* Write {instead}\."
    with pytest.raises(ConfigError, match=told):
        ImageProcessor.load(str(tmp_path))


def test_image_and_video_placeholders_are_banned(folder, tmp_path):
    assert ImageProcessor.load(folder).banned_token_ids == (8, 9)
    other = tiny_vision.make("internvl", tmp_path)  # nothing reads its token of a video
    assert ImageProcessor.load(str(other)).banned_token_ids == (8,)


def test_a_folder_without_an_image_processor_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"The image processor of .* cannot be read"):
        ImageProcessor.load(str(tmp_path))


def test_a_picture_that_comes_several_times_is_decoded_once_and_its_pixels_are_the_same(folder):
    processor = ImageProcessor.load(str(folder))
    small, wide = (read_picture(tiny_vision.noise(28, 28 * size, size)) for size in (1, 2))
    alone = {picture: processor.pixels([picture]) for picture in (small, wide)}
    asked, seen = [wide, small, wide, wide], []
    picture_type = type(small)
    with pytest.MonkeyPatch.context() as patch:
        decode = picture_type.open
        patch.setattr(picture_type, "open", lambda self: (seen.append(self), decode(self))[1])
        found = processor.pixels(asked)
    assert seen == [wide, small]
    assert torch.equal(found.pixels, torch.cat([alone[picture].pixels for picture in asked]))
    assert torch.equal(found.grid, torch.cat([alone[picture].grid for picture in asked]))


def test_a_file_that_is_not_there_is_said():
    with pytest.raises(PictureError, match="there is no such file"):
        read_picture(Path("nope.png"))
