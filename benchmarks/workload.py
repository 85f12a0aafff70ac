"""The fixed workload every benchmark runs: a 3.4 M-parameter Qwen2 in fp32, 16 prompts x 8 samples.

Made on the spot and seeded, so that both sides of a ratio see the same model, prompts and tokens.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.tiny import make_model

VOCAB_SIZE = 2048
NUM_PROMPTS = 16
NUM_SAMPLES = 8  # of a prompt
PROMPT_TOKENS = (16, 44)  # the least and the most of a prompt


@dataclass(frozen=True)
class Workload:
    """Where the model lies and how long responses are."""

    model: Path
    max_new_tokens: int = 64
    micro_batch: int = NUM_PROMPTS * NUM_SAMPLES  # completions in a micro-batch of TRL's

    @property
    def num_completions(self) -> int:
        """Completions of one step."""
        return NUM_PROMPTS * NUM_SAMPLES


def make_workload(folder: Path, *, max_new_tokens: int = 64, hidden_size: int = 256) -> Workload:
    """Write the model (once) and answer the workload."""
    path = folder / f"model-{hidden_size}"
    if not (path / "config.json").exists():
        make_model(
            path,
            hidden_size=hidden_size,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            vocab_size=VOCAB_SIZE,
        )
    return Workload(path, max_new_tokens)


def prompt_token_ids() -> list[list[int]]:
    """Random prompts of several lengths: tokens of one ASCII character each, so that the prompts as
    text are the same tokens.
    """
    generator = torch.Generator().manual_seed(0)
    least, most = PROMPT_TOKENS
    lengths = torch.randint(least, most + 1, (NUM_PROMPTS,), generator=generator).tolist()
    return [torch.randint(10, 100, (n,), generator=generator).tolist() for n in lengths]


def prompt_texts(model: Path) -> list[str]:
    """The same prompts as text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer.decode(ids) for ids in prompt_token_ids()]
    assert tokenizer(texts).input_ids == prompt_token_ids()
    return texts


def groups_to_train_on(work: Workload) -> list[torch.Tensor]:
    """Samples of each prompt with random responses, (NUM_SAMPLES, prompt + response) int64."""
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_SAMPLES, work.max_new_tokens)
    return [
        torch.cat(
            [
                torch.tensor([prompt] * NUM_SAMPLES),
                torch.randint(10, VOCAB_SIZE, shape, generator=generator),
            ],
            dim=1,
        )
        for prompt in prompt_token_ids()
    ]


def write_prompts(folder: Path, *, num_steps: int, model: Path) -> Path:
    """A prompt file with enough rows for `num_steps` steps."""
    path = folder / f"prompts-{num_steps}.jsonl"
    rows = [{"input": text} for _ in range(num_steps) for text in prompt_texts(model)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
