"""Make what `make demo-vision` trains: a tiny untrained vision-language model, and pictures.

A picture is a patch of noisy colour, or a digit. Of the answers that the model learns first 60 of
100 are drawn at random; only the right one is rewarded, so there is something to learn after it. In
the pictures of the blind control there is nothing but noise. Nothing is downloaded.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from openrlhf.utils.framework_logs import quiet_frameworks

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 40), "blue": (40, 60, 220)}
COLOURS["yellow"] = (220, 200, 40)
DIGITS = "0123456789"
QUESTIONS = {"colour": list(COLOURS), "digit": list(DIGITS)}
SIDE, PATCH = 28, 14  # of a picture, which is one token, and of its patches
NOISE_RATE = 0.35  # of the answers of the warm-up
NUM_ROWS = {"warm_up": 9600, "prompts": 1280, "blind": 640, "held_out": 100, "blind_held_out": 100}
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a letter or digit, and a chat template that marks images."""
    words = [*SPECIAL_TOKENS, *VISION_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={word: k for k, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=[*SPECIAL_TOKENS[2:], *VISION_TOKENS],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.PreTrainedModel:
    """An untrained Qwen2.5-VL of two layers, with a tower of two."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [8, 4, 4],
            "rope_theta": 10000.0,
        },
    }
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "out_hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 8 * PATCH,
        "fullatt_block_indexes": [1],
    }
    start, end, image, video = tokenizer.convert_tokens_to_ids(VISION_TOKENS)
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def save_processors(folder: Path) -> None:
    """Write the files that say how pictures become patches."""
    sizes = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    limits = {"shortest_edge": SIDE**2, "longest_edge": 16 * SIDE**2}
    image = transformers.Qwen2VLImageProcessorPil(**sizes, size=limits).to_dict()
    files = {
        "preprocessor_config": image | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config": sizes | {"video_processor_type": "Qwen2VLVideoProcessor"},
        "processor_config": {},
    }
    for name, content in files.items():
        whole = content | {"processor_class": "Qwen2_5_VLProcessor"}
        (folder / f"{name}.json").write_text(json.dumps(whole, indent=1))


def picture(word: str, rng: np.random.Generator) -> Image.Image:
    """Return a noisy picture of a colour or a digit."""
    background = COLOURS.get(word, (0, 0, 0))
    image = Image.new("RGB", (SIDE, SIDE), background)
    if word in DIGITS:
        ImageDraw.Draw(image).text((7, 0), word, font=ImageFont.load_default(26))
    pixels = np.asarray(image) * rng.uniform(0.7, 1.0) + rng.normal(0, 12, (SIDE, SIDE, 3))
    return Image.fromarray(pixels.clip(0, 255).astype("uint8"))


def rows(folder: Path, name: str, rng: np.random.Generator) -> Iterator[dict[str, object]]:
    """Yield rows with a picture each, whose right answer is `label`."""
    is_blind = name.startswith("blind")
    for number in range(NUM_ROWS[name]):
        what = "colour" if rng.random() < 0.5 else "digit"
        word = str(rng.choice(QUESTIONS[what]))
        path = folder / "pictures" / f"{name}-{number:05}.png"
        picture("" if is_blind else word, rng).save(path)
        is_noisy = name == "warm_up" and rng.random() < NOISE_RATE
        yield {
            "prompt": f"<image>{what}?",
            "images": [f"pictures/{path.name}"],
            "answer": str(rng.choice(QUESTIONS[what])) if is_noisy else word,
            "label": word,
        }


def main() -> None:
    """Write model and data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    quiet_frameworks()
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    (args.folder / "pictures").mkdir(parents=True)
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(args.folder / "model")
    tokenizer.save_pretrained(args.folder / "model")
    save_processors(args.folder / "model")
    for name in NUM_ROWS:
        lines = (json.dumps(row) for row in rows(args.folder, name, rng))
        (args.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
