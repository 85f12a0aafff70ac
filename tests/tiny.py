"""Tiny models, tokenizers and data made on the spot: nothing in the tests is downloaded."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def make_tokenizer(
    path: Path | str, merges: Sequence[tuple[str, str]] = ()
) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer with 262 ids and a chat template, saved at `path`; each merge of two
    tokens is one id more.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *map("".join, merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL_TOKENS[2:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return tokenizer


ARCHITECTURES = {
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "gemma": transformers.GemmaConfig,
    "gemma2": transformers.Gemma2Config,
    "gpt_neox": transformers.GPTNeoXConfig,
    "mixtral": transformers.MixtralConfig,
    "bloom": transformers.BloomConfig,
    "qwen3_next": transformers.Qwen3NextConfig,
}


def make_model(
    path: Path | str,
    architecture: str = "qwen2",
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 2,  # head size 32: the least that vLLM has a CPU kernel for
    num_kv_heads: int = 1,
    vocab_size: int | None = None,
    is_tied: bool = False,
    seed: int = 0,
    **overrides: object,
) -> Path:
    """A random causal LM with its tokenizer, saved at `path` in Hugging Face format."""
    path = Path(path)
    tokenizer = make_tokenizer(path)
    common = {
        "vocab_size": vocab_size or len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": is_tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if architecture != "gpt_neox":
        common["num_key_value_heads"] = num_kv_heads
    if architecture in ("gemma", "gemma2", "qwen3"):
        common["head_dim"] = hidden_size // num_heads
    if architecture == "mixtral":
        common.update(num_local_experts=4, num_experts_per_tok=2)
    if architecture == "qwen3_next":
        common.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        common.update(linear_num_key_heads=2, linear_num_value_heads=2, head_dim=16)
        common.update(linear_key_head_dim=16, linear_value_head_dim=16)
        common.update(layer_types=["linear_attention", "full_attention"] * (num_layers // 2))
    config = ARCHITECTURES[architecture](**{**common, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(path)
    return path


def write_jsonl(path: Path | str, rows: list[dict]) -> Path:
    """Write rows as JSON lines and answer the path."""
    path = Path(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_jsonl(path: Path | str) -> list[dict]:
    """Return the rows of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def make_reward_model(path: Path | str, *, seed: int = 1, **model: object) -> Path:
    """A random reward model in Hugging Face format, with the mean and std of its scores in the
    config.
    """
    path = make_model(path, seed=seed, **model)  # type: ignore[arg-type]
    config = transformers.AutoConfig.from_pretrained(path)
    config.num_labels = 1
    config.mean, config.std = 0.1, 0.5
    torch.manual_seed(seed)
    reward_model = transformers.AutoModelForSequenceClassification.from_config(
        config, dtype=torch.float32
    )
    with torch.no_grad():
        reward_model.score.weight.normal_(std=0.3)
    reward_model.save_pretrained(path)
    return path


def as_openrlhf_saves(
    path: Path | str, target: Path | str, *, head: str = "score", kind: str = "RewardModel"
) -> Path:
    """A copy of a reward model in the format of OpenRLHF 0.8 to 0.11: a class of its own in the
    config, which names the head and no labels; the backbone under `model.`.
    """
    from safetensors.torch import load_file, save_file

    path, target = Path(path), Path(target)
    shutil.copytree(path, target)
    config = json.loads((path / "config.json").read_text())
    for key in ("id2label", "label2id", "num_labels"):
        config.pop(key, None)
    config.update(architectures=[kind], value_head_prefix=head)
    (target / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    assert weights["score.weight"].size(0) == 1
    weights[f"{head}.weight"] = weights.pop("score.weight")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


class Payload:
    """What an attacker puts into a pickle: loading it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)
