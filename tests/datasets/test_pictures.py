"""Rows with pictures: every form of them gives the same tokens, and what is wrong names its row."""

import base64
import io
import json

import datasets
import pytest
from datasets import Dataset

from openrlhf.datasets import tokenized
from openrlhf.datasets.loading import load_rows
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.reward_dataset import PreferenceDataset
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.datasets.tokenized import RowFormat
from openrlhf.errors import DataError
from openrlhf.utils.images import ImageProcessor
from openrlhf.utils.tokenizer import load_tokenizer
from tests.helpers import tiny_vision
from tests.tiny import write_jsonl

PAD = 8  # <|image_pad|>; a picture of 28x56 pixels has two of them
SMALL, WIDE = tiny_vision.noise(28, 28), tiny_vision.noise(28, 56, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_vision.make("qwen2_5_vl", tmp_path_factory.mktemp("vision")))


@pytest.fixture
def folder(tmp_path):
    SMALL.save(tmp_path / "small.png")
    WIDE.save(tmp_path / "wide.png")
    return tmp_path


def data_set(model, rows, kind=SFTDataset, **form):
    form = RowFormat(**{"output_key": "answer", "input_key": "prompt", **form})
    if not isinstance(rows, Dataset):
        rows = Dataset.from_list(rows)
    return kind(rows, load_tokenizer(model), form, ImageProcessor.load(model))


def png(image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def part(**value):
    return {"type": "image", **value}


def words(text):
    return {"type": "text", "text": text}


def test_parts_tags_and_columns_give_the_same_tokens_and_pictures(model, folder):
    """A path is looked for beside the file of the row."""
    files = ["wide.png", "small.png"]
    rows = [
        {"prompt": "<image>a<image>b", "images": files},
        {"prompt": [{"role": "user", "content": "<image>a<image>b"}], "images": files},
        {
            "prompt": [{"role": "user", "content": [part(), words("a"), part(), words("b")]}],
            "images": files,
        },
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [
                        part(image="wide.png"),
                        words("a"),
                        {
                            "type": "image_url",
                            "image_url": {
                                "url": "data:image/png;base64,"
                                + base64.b64encode(png(SMALL)).decode()
                            },
                        },
                        words("b"),
                    ],
                }
            ]
        },
    ]
    found = []
    for number, row in enumerate(rows):
        file = write_jsonl(folder / f"{number}.jsonl", [row | {"answer": "yes"}])
        data = data_set(model, load_rows(str(file)))
        example, pictures = data[0], data.images(0)
        assert [picture.open().tobytes() for picture in pictures] == [
            WIDE.tobytes(),
            SMALL.tobytes(),
        ]
        found.append((example.token_ids.tolist(), example.loss_mask.tolist()))
    assert found == [found[0]] * 4
    text = load_tokenizer(model).decode(found[0][0])
    place = "<|vision_start|>{}<|vision_end|>"
    two, one = place.format("<|image_pad|>" * 2), place.format("<|image_pad|>")
    assert text == f"<|user|>{two}a{one}b<|end|><|assistant|>yes<|end|>"


def test_pictures_without_a_place_stand_before_the_users_first_words(model):
    rows = [{"prompt": "what?", "image": WIDE, "answer": "noise"}]
    features = {"prompt": datasets.Value("string"), "image": datasets.Image()}
    features = datasets.Features(features | {"answer": datasets.Value("string")})
    data = data_set(model, Dataset.from_list(rows, features=features))
    text = load_tokenizer(model).decode(data[0].token_ids)
    assert text.startswith("<|user|><|vision_start|><|image_pad|><|image_pad|><|vision_end|>what?")
    assert data.notices[0].endswith("put into the chat template, with the images of 'image'")
    assert (data.costs - data.lengths).tolist() == [2]


def test_every_turn_may_have_pictures_and_no_placeholder_is_learnt(model, folder):
    turns = [
        {"role": "user", "content": [part(), words("1")]},
        {"role": "assistant", "content": [words("one"), part()]},
        {"role": "user", "content": [part(), words("2")]},
        {"role": "assistant", "content": [words("two")]},
    ]
    files = [str(folder / name) for name in ("small.png", "wide.png", "small.png")]
    rows = [{"messages": turns, "images": files}]
    data = data_set(model, rows, output_key=None, input_key=None, multiturn=True)
    example = data[0]
    assert (example.token_ids == PAD).sum() == 4
    learnt = load_tokenizer(model).decode(example.token_ids[example.loss_mask])
    assert learnt == "one<|vision_start|><|vision_end|><|end|>two<|end|>"


@pytest.mark.parametrize("begin", ["<image>a", "a"])
def test_an_answer_may_speak_of_the_mark_of_an_image(model, folder, begin):
    files = {"images": [str(folder / "small.png")]}
    turns = [{"role": "user", "content": begin}, {"role": "assistant", "content": "an <image>"}]
    forms = [{"prompt": begin, "answer": "an <image>"}, {"messages": turns}]
    for row, column in zip(forms, ("prompt", "messages"), strict=True):
        output = "answer" if column == "prompt" else None
        [example] = data_set(model, [row | files], input_key=column, output_key=output)
        assert load_tokenizer(model).decode(example.token_ids) == (
            "<|user|><|vision_start|><|image_pad|><|vision_end|>a<|end|>"
            "<|assistant|>an <image><|end|>"
        )


def test_images_of_a_system_column_that_gives_way_are_not_counted(model, folder):
    beside = {"system": [part(image=str(folder / "small.png")), words("Be terse.")]}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    own = [{"role": "system", "content": "Be kind."}, *turns]
    for messages, count in ((own, 0), (turns, 1)):
        data = data_set(model, [beside | {"m": messages}], input_key="m", output_key=None)
        assert (data[0].token_ids == PAD).sum() == len(data.images(0)) == count


def test_images_may_lie_within_a_column(model, folder):
    row = {"prompt": "a", "seen": {"left": [str(folder / "wide.png")]}, "answer": "b"}
    data = data_set(model, [row], image_key="seen.left")
    assert data[0].token_ids.tolist().count(PAD) == 2
    assert data.notices == [
        "'prompt' and 'answer' read as text, put into the chat template, with the images of "
        "'seen.left'"
    ]


def test_a_column_of_images_that_a_flag_names_is_read(model, folder):
    row = {"prompt": "a", "alt": str(folder / "wide.png"), "image": None, "answer": "b"}
    data = data_set(model, [row], image_key="alt")
    assert data[0].token_ids.tolist().count(PAD) == 2
    assert data.notices[1:] == ["not read: 'image'"]


@pytest.mark.parametrize("key", ["image", "image_url", "path"])
def test_images_of_a_column_may_be_objects(model, folder, key):
    """As verl's rows have them."""
    own = {"bytes": png(SMALL), "path": "nowhere.png"}
    values = [{key: str(folder / "wide.png")}, own if key == "path" else {key: own}]
    for value, num_tokens in zip(values, (2, 1), strict=True):
        [example] = data_set(model, [{"prompt": "a", "images": [value], "answer": "b"}])
        assert example.token_ids.tolist().count(PAD) == num_tokens


def test_rows_of_mixed_data_sets_have_their_images_in_either_column(model, folder):
    """Where both have a value, one is read, and it is said."""
    small, wide = (str(folder / name) for name in ("small.png", "wide.png"))
    rows = [{"images": [small], "image": None}, {"images": None, "image": wide}]
    rows = [row | {"prompt": "a", "answer": "b"} for row in rows]
    data = data_set(model, rows)
    assert [example.token_ids.tolist().count(PAD) for example in data] == [1, 2]
    assert len(data.notices) == 1
    both = data_set(model, [rows[0] | {"image": wide}])
    assert both[0].token_ids.tolist().count(PAD) == 1
    assert both.notices[1:] == ["not read: 'image' of rows with 'images'"]


def test_a_prompt_carries_its_pictures_and_not_their_column(model, folder):
    parts = [part(image=str(folder / "wide.png")), words("what?")]
    row = {"prompt": [{"role": "user", "content": parts}], "answer": "4", "images": None}
    record = data_set(model, [row], PromptDataset, label_key="answer")[0]
    assert record.prompt_token_ids.count(PAD) == record.num_image_tokens == 2
    assert record.of_samples["num_image_tokens"] == 2 and record.columns == {"answer": "4"}
    assert [(image.width, image.height) for image in record.images] == [(56, 28)]
    assert record.source == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
    ]


def test_the_turns_of_a_history_have_places_too(model, folder):
    """By tags or by parts, whose own pictures come in the order of their places."""
    wide, small = (str(folder / name) for name in ("wide.png", "small.png"))
    asked = [part(image=wide), words("a")]
    own = [{"role": "user", "content": asked}, {"role": "assistant", "content": [words("b")]}]
    prompt = [{"role": "user", "content": [part(image=small), words("c")]}]
    rows = [
        {"history": [["<image>a", "b"]], "prompt": "<image>c", "images": [wide, small]},
        {"history": own, "prompt": prompt},
        {"history": json.dumps(own), "prompt": prompt},
        {"history": own, "prompt": [{"role": "user", "content": [part(), words("c")]}]}
        | {"images": [small]},
    ]
    for row in rows:
        data = data_set(model, [row | {"answer": "d", "system": "s"}], apply_chat_template=True)
        text = load_tokenizer(model).decode(data[0].token_ids)
        seen = [part.count("<|image_pad|>") for part in text.split("<|user|>")]
        assert seen == [0, 2, 1]


def test_a_system_message_has_the_place_that_it_marks(model, folder):
    row = {"system": "See <image>", "prompt": "what?", "images": [str(folder / "small.png")]}
    [example] = data_set(model, [row | {"answer": "b"}], apply_chat_template=True)
    text = load_tokenizer(model).decode(example.token_ids)
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text.startswith(f"<|system|>See {place}<|end|><|user|>what?<|end|>")


def test_a_noncharacter_of_a_text_is_none_of_its_pictures(model, folder):
    """Whether the model reads pictures or not."""
    row = {"prompt": "a\ufdd1b", "images": [str(folder / "small.png")], "answer": "c"}
    for most, count in ((None, 1), (0, 0)):
        form = {"max_images_per_prompt": most, "apply_chat_template": True}
        [example] = data_set(model, [row], **form)
        assert example.token_ids.tolist().count(PAD) == count
        assert "a\ufffdb<|end|>" in load_tokenizer(model).decode(example.token_ids)


BAD = [
    ({"prompt": "<image>a<image>", "images": ["small.png"]}, "images: 1, and places for them: 2"),
    ({"prompt": "<image>a", "images": ["small.png"] * 2}, "images: 2, and places for them: 1"),
    ({"prompt": "<image>a", "images": []}, "images: 0, and places for them: 1"),
    ({"prompt": "<image>a", "images": None}, "images: 0, and places for them: 1"),
    ({"prompt": "a", "images": ["gone.png"]}, "'gone.png' is neither a file nor base64"),
    ({"prompt": "a", "images": ["torn.png"]}, "an image that cannot be decoded"),
    ({"prompt": "a", "images": ["http://a.b/c.png"]}, "is a URL: images are not fetched"),
    ({"prompt": "a", "images": ["narrow.png"]}, "an image of 300x1 pixels: absolute aspect ratio"),
    ({"prompt": "a", "images": ["small.png"] * 3}, "3 images, over --max_images_per_prompt 2"),
]


@pytest.mark.parametrize(("row", "told"), BAD)
def test_a_bad_picture_names_its_row(model, folder, row, told):
    (folder / "torn.png").write_bytes(png(SMALL)[:-600])
    tiny_vision.noise(1, 300).save(folder / "narrow.png")
    good = {"prompt": "a", "images": ["small.png"], "answer": "b"}
    file = write_jsonl(folder / "rows.jsonl", [good, row | {"answer": "b"}])
    with pytest.raises(DataError, match=rf"rows\.jsonl: row 2: .*{told}"):
        data_set(model, load_rows(str(file)), max_images_per_prompt=2)


def test_rows_with_bad_pictures_may_be_left_out(model, folder):
    files = [["gone.png"], ["small.png"], ["small.png"] * 2, ["wide.png"]]
    rows = [{"prompt": "<image>a", "images": seen, "answer": "b"} for seen in files]
    file = write_jsonl(folder / "rows.jsonl", rows)
    data = data_set(model, load_rows(str(file)), bad_rows="skip")
    assert data.row_ids == [1, 3] and data.dropped == {"bad": 2}
    assert [row for row, _ in data.bad_rows] == [0, 2]
    assert [[image.width for image in data.images(i)] for i in range(2)] == [[28], [56]]


def test_no_placeholder_that_a_text_spells_is_learnt(model, folder):
    rows = [{"prompt": "a", "answer": "b<|video_pad|>c"}]
    tokenizer = load_tokenizer(model)
    [example] = data_set(model, rows)
    assert "<|video_pad|>" in tokenizer.decode(example.token_ids)
    learnt = tokenizer.decode(example.token_ids[example.loss_mask])
    assert learnt.startswith("b") and "video_pad" not in learnt


def test_sides_of_a_pair_with_other_images_are_refused(model, folder):
    def dialogue(name, said):
        asked = {"role": "user", "content": [part(image=str(folder / name)), words("?")]}
        return [asked, {"role": "assistant", "content": said}]

    def pair(rejected):
        row = {"chosen": dialogue("small.png", "a"), "rejected": dialogue(rejected, "b")}
        rows = load_rows(str(write_jsonl(folder / f"{rejected}.jsonl", [row])))
        return data_set(model, rows, PreferenceDataset, input_key=None, output_key=None)[0]

    with pytest.raises(DataError, match="row 1: the images of both sides differ"):
        pair("wide.png")
    assert len(pair("small.png").images) == 1


def test_images_of_a_prompt_column_are_not_those_of_whole_dialogues_too(model, folder):
    """The dialogues are read, the column is not."""
    content = [part(image=str(folder / "small.png")), words("?")]
    asked = {"role": "user", "content": content}
    sides = {
        name: [asked, {"role": "assistant", "content": [words(name)]}]
        for name in ("chosen", "rejected")
    }
    row = {"prompt": [asked], **sides}
    data = data_set(model, [row], PreferenceDataset, input_key=None, output_key=None)
    assert len(data[0].images) == 1
    assert data[0].chosen_ids.tolist().count(PAD) == 1


def test_images_of_a_label_are_not_those_of_its_prompt(model, folder):
    turns = [{"role": "user", "content": [part(image=str(folder / "small.png")), words("?")]}]
    row = {"prompt": turns, "label": turns}
    data = data_set(model, [row], PromptDataset, output_key=None, label_key="label")
    assert len(data[0].images) == 1


@pytest.mark.parametrize("kind", [SFTDataset, PromptDataset])
@pytest.mark.parametrize("overlong", ["filter", "truncate", "error"])
def test_a_row_with_pictures_is_left_out_or_named_and_never_cut(model, folder, overlong, kind):
    large = tiny_vision.noise(28 * 6, 28 * 6)
    large.save(folder / "large.png")
    rows = [{"prompt": "a", "images": [str(folder / n)]} for n in ("large.png", "small.png")]
    rows = [row | {"answer": "b"} for row in rows]
    limits = {"max_len": 20, "overlong": overlong}
    if overlong == "error":
        with pytest.raises(DataError, match=r"row 1: 4\d tokens, over the limit of 20"):
            data_set(model, rows, kind, **limits)
        return
    data = data_set(model, rows, kind, **limits)
    assert data.row_ids == [1] and data.dropped == {"over-long": 1}


def test_the_cache_holds_no_pixels_and_notices_another_picture(model, folder, monkeypatch):
    file = write_jsonl(
        folder / "rows.jsonl", [{"prompt": "a", "images": ["it.png"], "answer": "b"}]
    )
    SMALL.save(folder / "it.png")
    first = data_set(model, load_rows(str(file)))
    assert first[0].token_ids.tolist().count(PAD) == 1
    size = sum(len(str(row)) for row in first._table)
    assert size < 1000 and "pixel" not in str(first._table.features)
    WIDE.save(folder / "it.png")
    with pytest.raises(DataError, match=r"rows\.jsonl: row 1: its images changed"):
        first[0]
    second = data_set(model, load_rows(str(file)))
    assert second[0].token_ids.tolist().count(PAD) == 2
    assert first.fingerprint != second.fingerprint
    monkeypatch.setattr(tokenized, "read_picture", None)  # a third reads it from the cache
    data_set(model, load_rows(str(file)))


def test_the_cache_notices_another_picture_in_messages_that_are_json_text(model, folder):
    turns = [{"role": "user", "content": [part(image="it.png"), words("a")]}]
    turns.append({"role": "assistant", "content": "b"})
    file, form = folder / "rows.jsonl", {"input_key": "messages", "output_key": None}
    write_jsonl(file, [{"messages": json.dumps(turns)}])
    for picture, num_tokens in ((SMALL, 1), (WIDE, 2)):
        picture.save(folder / "it.png")
        [example] = data_set(model, load_rows(str(file)), **form)
        assert example.token_ids.tolist().count(PAD) == num_tokens


PLAIN = {"apply_chat_template": False}
NONE = {"apply_chat_template": False, "max_images_per_prompt": 0}


@pytest.mark.parametrize(
    ("row", "form", "told"),
    [
        ({"prompt": "<|image_pad|><|image_pad|>"}, PLAIN, "two places for images without a token"),
        ({"prompt": "<|image_pad|>"}, NONE, "its text spells the placeholder of an image"),
        ({"prompt": "<|video_pad|>"}, NONE, "its text spells the placeholder of an image"),
    ],
)
def test_places_that_plain_text_spells_are_counted_and_stand_apart(model, folder, row, form, told):
    row = row | {"images": [str(folder / "small.png")] * 2, "answer": "b"}
    with pytest.raises(DataError, match=f"row 1: .*{told}"):
        data_set(model, [row], **form)


def test_a_mark_is_text_where_no_column_has_images(model):
    rows = [{"prompt": "an <image>", "answer": "b"}]
    [example] = data_set(model, rows, apply_chat_template=True)
    assert "an <image><|end|>" in load_tokenizer(model).decode(example.token_ids)


@pytest.mark.parametrize("suffix", ["gif", "tiff"])
def test_frames_behind_the_first_are_named_as_not_read(model, folder, suffix):
    path = folder / f"several.{suffix}"
    WIDE.save(path, save_all=True, append_images=[SMALL.resize(WIDE.size)])
    rows = [{"prompt": "a", "images": [str(path)], "answer": "b"}]
    data = data_set(model, rows)
    assert data[0].token_ids.tolist().count(PAD) == 2
    assert data.notices[1:] == ["not read: frames of images behind the first"]


def test_a_damaged_frame_behind_the_first_is_none_that_is_read(model, folder):
    path = folder / "several.gif"
    WIDE.save(path, save_all=True, append_images=[SMALL.resize(WIDE.size)])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 + 100])  # in the second one's head
    rows = [{"prompt": "a", "images": [str(path)], "answer": "b"}]
    assert len(data_set(model, rows).images(0)) == 1


def test_a_torn_image_within_a_column_of_a_hub_data_set_names_its_row(model, folder):
    torn = {"bytes": png(SMALL)[:-600], "path": None}
    rows = [{"prompt": "a", "seen": {"left": value}, "answer": "b"} for value in (SMALL, torn)]
    text, seen = datasets.Value("string"), {"left": datasets.Image()}
    features = datasets.Features({"prompt": text, "seen": seen, "answer": text})
    with pytest.raises(DataError, match="row 2: an image that cannot be decoded"):
        data_set(model, Dataset.from_list(rows, features=features), image_key="seen.left")


def test_images_are_not_read_where_none_is_allowed(model, folder):
    rows = [{"prompt": "a", "images": ["gone.png"], "answer": "b"}]
    data = data_set(model, rows, max_images_per_prompt=0)
    assert "not read: 'images'" in data.notices
    assert PAD not in data[0].token_ids
