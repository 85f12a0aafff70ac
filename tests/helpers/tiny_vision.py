"""Tiny random vision-language models with tokenizer and image processor, and noisy colours."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

from tests.tiny import SPECIAL_TOKENS

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
KINDS = (*QWEN, "internvl", "idefics3", "smolvlm")
TILE, PATCH = 56, 14  # pixels; four tokens a tile
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
INTERN_TOKENS = ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
IDEFICS_TOKENS = ["<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>"]
ROWS = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
TOKENS = {  # the third of each stands for an image
    **dict.fromkeys(QWEN, VISION_TOKENS),
    "internvl": INTERN_TOKENS,
    **{kind: [*IDEFICS_TOKENS, *ROWS] for kind in ("idefics3", "smolvlm")},
}
TEMPLATE = (
    "{% macro body(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endmacro %}{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ body(message['content']) }}<|end|>{% endgeneration %}"
    "{% else %}{{ body(message['content']) }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COLOURS = {"red": (220, 40, 40), "green": (40, 200, 40), "blue": (40, 60, 220)}
COLOURS["gray"] = (128, 128, 128)


def make_tokenizer(path: Path, kind: str = "qwen2_vl") -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer with 266 ids or more and a chat template, saved at `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = [*SPECIAL_TOKENS, *TOKENS[kind]]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    names = ("start_image_token", "end_image_token", "context_image_token", "video_token")
    named = dict(zip(names, INTERN_TOKENS, strict=True)) if kind == "internvl" else {}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        extra_special_tokens=named,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[2:]})
    place = special[8] if kind not in QWEN else "".join(VISION_TOKENS[i] for i in (0, 2, 1))
    tokenizer.chat_template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", place)
    tokenizer.save_pretrained(path)
    return tokenizer


def text_sizes(tokenizer: transformers.PreTrainedTokenizerFast) -> dict:
    """What the language models of all families have in common."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def config_of(kind: str, tokenizer: transformers.PreTrainedTokenizerFast, patch: int):
    """The config of a family: hidden size 64, two layers, head size 32."""
    if kind not in QWEN:
        return tiled_config(kind, tokenizer)
    rope = {"rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 10000.0}
    text = text_sizes(tokenizer) | {"rope_parameters": rope}
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 2, "patch_size": patch}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    names = ("vision_start", "vision_end", "image", "video")
    numbers = tokenizer.convert_tokens_to_ids(VISION_TOKENS)
    ids = {f"{name}_token_id": number for name, number in zip(names, numbers, strict=True)}
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 64, "mlp_ratio": 2}
        return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    vision |= {"out_hidden_size": 64, "intermediate_size": 128}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 8 * patch, "fullatt_block_indexes": [1]}
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    text |= {"head_dim": 32, "rope_parameters": rope | {"mrope_interleaved": True}}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)


def tiled_config(kind: str, tokenizer: transformers.PreTrainedTokenizerFast):
    """The config of a family that cuts pictures into tiles, of the same size."""
    family = "qwen2" if kind == "internvl" else "llama"
    text = text_sizes(tokenizer) | {"model_type": family}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": TILE, "patch_size": PATCH}
    own = {"text_config": text, "vision_config": vision, "image_token_id": 8}
    if kind == "internvl":
        return transformers.InternVLConfig(**own, image_seq_length=4, downsample_ratio=0.5)
    own |= {"scale_factor": 2, "pad_token_id": tokenizer.pad_token_id}
    kinds = {"idefics3": transformers.Idefics3Config, "smolvlm": transformers.SmolVLMConfig}
    return kinds[kind](**own)


def tiled_files(kind: str) -> dict[str, dict[str, object]]:
    """The files of the processors of a family that cuts pictures into tiles."""
    if kind == "internvl":
        processor = transformers.GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE})
        own, name, length = "GotOcr2", "InternVL", {"image_seq_length": 4}
    else:
        own = name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[kind]
        processor = getattr(transformers, f"{name}ImageProcessorPil")(
            size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}
        )
        length = {"image_seq_len": 4}
    files = {"processor_config": {**length, "processor_class": f"{name}Processor"}}
    if kind != "idefics3":
        files["video_preprocessor_config"] = {"video_processor_type": f"{name}VideoProcessor"}
    kept = processor.to_dict() | {"image_processor_type": f"{own}ImageProcessor"}
    return files | {"preprocessor_config": kept | {"processor_class": f"{name}Processor"}}


def make(
    kind: str, path: Path | str, *, seed: int = 0, patch: int = 14, is_tied: bool = False
) -> Path:
    """A random model of a family with its tokenizer and image processor, saved at `path`; of
    Qwen's, a picture of 2x2 patches is one token. `is_tied`: the embedding is the head, as in small
    models.
    """
    path = Path(path)
    tokenizer = make_tokenizer(path, kind)
    torch.manual_seed(seed)
    config = config_of(kind, tokenizer, patch)
    config.tie_word_embeddings = is_tied  # the text's own config says nothing of it
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(path)
    if kind not in QWEN:
        for name, content in tiled_files(kind).items():
            (path / f"{name}.json").write_text(json.dumps(content, indent=1))
        return path
    side = 2 * patch
    sizes = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    processor = transformers.Qwen2VLImageProcessorPil(
        **sizes, size={"shortest_edge": side**2, "longest_edge": 64 * side**2}
    ).to_dict()
    names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    whole = {"processor_class": f"{names[kind]}Processor"}
    video = "Qwen3VL" if kind == "qwen3_vl" else "Qwen2VL"
    files = {
        "preprocessor_config": processor | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config": sizes | {"video_processor_type": f"{video}VideoProcessor"},
        "processor_config": {},
    }
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content | whole, indent=1))
    return path


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    return Image.fromarray(pixels.astype("uint8"))


def colour(word: str, rng: np.random.Generator, side: int = 28) -> Image.Image:
    """A noisy picture of one of COLOURS, darker or brighter."""
    pixels = np.array(COLOURS[word]) * rng.uniform(0.6, 1.1) + rng.normal(0, 12, (side, side, 3))
    return Image.fromarray(pixels.clip(0, 255).astype("uint8"))
