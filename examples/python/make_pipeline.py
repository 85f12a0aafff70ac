"""Makes what `sft_rm_ppo.sh` trains: a tiny untrained chat model and preferences it can learn.

The teacher answers every question with a few random letters; of two such answers people prefer the
one with more vowels. Nothing is downloaded.
"""

import argparse
import random
from pathlib import Path

import torch
import transformers
from make_demo import make_tokenizer, write_jsonl

from openrlhf.utils.framework_logs import quiet_frameworks

LETTERS = "abcdefghijkl"  # three of twelve are vowels
VOWELS = "aei"
NUM_SFT_ROWS, NUM_PAIRS, NUM_HELD_OUT, NUM_PROMPTS = 6400, 3200, 256, 512
Row = dict[str, str]


def make_model(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.PreTrainedModel:
    """An untrained Qwen2 of two layers; heads of 32, which every attention backend takes."""
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def question(rng: random.Random) -> str:
    """Three letters."""
    return "".join(rng.choices(LETTERS, k=3))


def answer(rng: random.Random) -> str:
    """Four to eight letters."""
    return "".join(rng.choices(LETTERS, k=rng.randint(4, 8)))


def num_vowels(text: str) -> int:
    """What people like."""
    return sum(letter in VOWELS for letter in text)


def pair(rng: random.Random) -> Row:
    """A question and two answers, the preferred one first."""
    while True:
        first, second = sorted((answer(rng), answer(rng)), key=num_vowels)
        if num_vowels(first) < num_vowels(second):
            return {"question": question(rng), "chosen": second, "rejected": first}


def main() -> None:
    """Write model and data into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    quiet_frameworks()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = make_tokenizer()
    for part in (tokenizer, make_model(tokenizer)):
        part.save_pretrained(args.folder / "model")
    sft = [{"question": question(rng), "answer": answer(rng)} for _ in range(NUM_SFT_ROWS)]
    write_jsonl(args.folder / "sft.jsonl", sft)
    write_jsonl(args.folder / "pairs.jsonl", [pair(rng) for _ in range(NUM_PAIRS)])
    write_jsonl(args.folder / "held_out_pairs.jsonl", [pair(rng) for _ in range(NUM_HELD_OUT)])
    prompts = [{"question": question(rng)} for _ in range(NUM_PROMPTS)]
    write_jsonl(args.folder / "prompts.jsonl", prompts)


if __name__ == "__main__":
    main()
