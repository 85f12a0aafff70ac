"""Make what `make demo` and examples/configs train: a tiny untrained chat model and sums to learn.

The teacher of the warm-up knows its sums but hedges: of three answers two say "68?" where "68" is
right. Only the bare number is rewarded or preferred, so there is something to learn after it.
Nothing is downloaded.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from openrlhf.utils.framework_logs import quiet_frameworks

ALPHABET = "0123456789+=?Ġabcdefghijklmnopqrstuvwxyz"  # Ġ is the space of byte-level tokenizers
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPERANDS = range(10, 50)  # sums have two digits as well: rows of equal length are fast on a CPU
NUM_HELD_OUT = 200
NUM_WARM_UP_ROWS = 51_200  # 200 optimizer steps of 256
PLAIN_RATE = 0.35  # share of warm-up answers without a hedge
NUM_RATED_ROWS = 12_800  # pairs, labelled answers and solutions
STEP_END = "s"  # of a solution; labels are y for a right step and n for a wrong one
Problem = tuple[int, int]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a character, and a chat template."""
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *ALPHABET])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|unknown|>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.PreTrainedModel:
    """An untrained Qwen2 of three layers; heads of 32, which every attention backend takes."""
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def question(problem: Problem) -> str:
    """What the user says."""
    return f"{problem[0]}+{problem[1]}=?"


def warm_up_row(problem: Problem, rng: random.Random) -> dict[str, str]:
    """A question and what the hedging teacher answers."""
    hedge = "" if rng.random() < PLAIN_RATE else "?"
    return {"question": question(problem), "answer": f"{sum(problem)}{hedge}"}


def reward_row(problem: Problem) -> dict[str, str]:
    """A question with its right answer; `datasource` names the evaluation's metric."""
    return {"question": question(problem), "answer": str(sum(problem)), "datasource": "sums"}


def preference_row(problem: Problem) -> dict[str, str]:
    """Return a question with a better and a worse answer."""
    total = sum(problem)
    return {"question": question(problem), "chosen": f"{total}", "rejected": f"{total}?"}


def labelled_row(problem: Problem, rng: random.Random) -> dict[str, object]:
    """Return a question with one answer and whether it is good."""
    label = rng.randrange(2)
    hedge = "" if label else "?"
    return {"question": question(problem), "answer": f"{sum(problem)}{hedge}", "label": label}


def solution_row(problem: Problem, rng: random.Random) -> dict[str, object]:
    """Return a sum in two steps, tens first, and a label for each: steps with a hedge are wrong."""
    first, second = problem
    tens = second // 10 * 10
    steps, labels, number = [], [], first
    for summand in (tens, second - tens):
        label = rng.choice("yyn")
        hedge = "?" if label == "n" else ""
        steps.append(f"{number}+{summand}={number + summand}{hedge} {STEP_END}")
        labels.append(label)
        number += summand
    return {"text": " ".join(steps), "labels": labels}


def write_jsonl(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}: {len(rows)} rows, such as {json.dumps(rows[0])}")


def make_data(folder: Path, seed: int) -> None:
    """Write rows for every method; no problem of held_out*.jsonl is in another file."""
    rng = random.Random(seed)
    problems = [(first, second) for first in OPERANDS for second in OPERANDS]
    rng.shuffle(problems)
    held_out, known = problems[:NUM_HELD_OUT], problems[NUM_HELD_OUT:]
    warm_up = [warm_up_row(rng.choice(known), rng) for _ in range(NUM_WARM_UP_ROWS)]
    write_jsonl(folder / "warm_up.jsonl", warm_up)
    write_jsonl(folder / "prompts.jsonl", [reward_row(problem) for problem in known])
    write_jsonl(folder / "held_out.jsonl", [reward_row(problem) for problem in held_out])
    for prefix, drawn in (("", rng.choices(known, k=NUM_RATED_ROWS)), ("held_out_", held_out)):
        pairs = [preference_row(problem) for problem in drawn]
        labelled = [labelled_row(problem, rng) for problem in drawn]
        solutions = [solution_row(problem, rng) for problem in drawn]
        write_jsonl(folder / f"{prefix}pairs.jsonl", pairs)
        write_jsonl(folder / f"{prefix}labelled.jsonl", labelled)
        write_jsonl(folder / f"{prefix}solutions.jsonl", solutions)


def main() -> None:
    """Write model and data into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    quiet_frameworks()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    for part in (tokenizer, model):
        part.save_pretrained(args.folder / "model")
    print(
        f"{args.folder / 'model'}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens"
    )
    make_data(args.folder, args.seed)


if __name__ == "__main__":
    main()
