"""What the benchmarks run: a 3.4 M-parameter Qwen2 with random weights, or a real model.

Both sides of a ratio see the same model, prompts and tokens: prompts are digits, of which the
tokenizers of both models make one token each.
"""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from tests.tiny import make_model

VOCAB_SIZE = 2048
NUM_SAMPLES = 8  # of a prompt


@dataclass(frozen=True)
class Workload:
    """A step of GRPO, or of a supervised trainer.

    Example: `Workload(Path("/tmp/bench"), max_new_tokens=256, dtype="bf16")`
    """

    folder: Path  # for what a measurement writes
    real_model: str = ""  # folder; empty: the small one
    hidden_size: int = 256  # of the small one
    max_new_tokens: int = 64
    num_prompts: int = 16
    least_prompt: int = 16  # tokens
    most_prompt: int = 44
    num_rows: int = 64  # rows, or pairs, of a supervised step
    micro_batch: int = 0  # rows in a micro-batch of TRL's; 0: all of a step
    num_steps: int = 0  # one of them warms up; 0: 7 or, of long responses, 5, of which two do
    dtype: str = "fp32"
    micro_batch_tokens: int = 0  # of ours; 0: the fastest for the small model

    @classmethod
    def parsed(cls, folder: str, words: list[str]) -> Self:
        """Return what a command line describes: a folder, and fields as `name=value`."""
        work, given = cls(Path(folder)), dict(word.split("=", 1) for word in words)
        kinds = {name: type(getattr(work, name)) for name in given}
        return replace(work, **{name: kinds[name](value) for name, value in given.items()})

    @cached_property
    def model(self) -> Path:
        """Return the folder of the model; the small one is written at first use."""
        if self.real_model:
            return Path(self.real_model).absolute()
        path = self.folder / f"model-{self.hidden_size}"
        if not (path / "config.json").exists():
            make_model(
                path,
                hidden_size=self.hidden_size,
                num_layers=4,
                num_heads=4,
                num_kv_heads=2,
                vocab_size=VOCAB_SIZE,
            )
        return path

    @property
    def num_completions(self) -> int:
        """Return the completions of one step."""
        return self.num_prompts * NUM_SAMPLES

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of a micro-batch of ours."""
        return self.micro_batch_tokens or (1024 if self.max_new_tokens <= 64 else 2048)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the type of matrix products."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]

    @property
    def steps_of_a_run(self) -> int:
        """Return the steps of a run of GRPO."""
        return self.num_steps or (7 if self.max_new_tokens <= 64 else 5)

    @property
    def num_warm(self) -> int:
        """Return the steps that warm up."""
        return 1 if self.num_steps else 2

    @cached_property
    def tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model)

    @cached_property
    def prompt_texts(self) -> list[str]:
        """Return prompts of several lengths."""
        generator = torch.Generator().manual_seed(0)
        sizes = (self.least_prompt, self.most_prompt + 1, (self.num_prompts,))
        lengths = torch.randint(*sizes, generator=generator).tolist()
        return [digits(length, seed) for seed, length in enumerate(lengths)]

    @cached_property
    def prompt_token_ids(self) -> list[list[int]]:
        """Return the tokens of the prompts."""
        return self.tokenizer(self.prompt_texts, add_special_tokens=False).input_ids

    def groups_to_train_on(self) -> list[torch.Tensor]:
        """Return samples of each prompt with random responses, (NUM_SAMPLES, prompt + response)
        int64.
        """
        generator = torch.Generator().manual_seed(1)
        shape = (NUM_SAMPLES, self.max_new_tokens)
        end = json.loads((self.model / "config.json").read_text())["vocab_size"]
        return [
            torch.cat(
                [
                    torch.tensor([prompt] * NUM_SAMPLES),
                    torch.randint(10, end, shape, generator=generator),
                ],
                dim=1,
            )
            for prompt in self.prompt_token_ids
        ]

    def write_prompts(self) -> Path:
        """Write a prompt file with enough rows for the steps of a run."""
        path = self.folder / f"prompts-{self.steps_of_a_run}.jsonl"
        rows = [{"input": text} for _ in range(self.steps_of_a_run) for text in self.prompt_texts]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path


def digits(num_tokens: int, seed: int) -> str:
    """Return so many random digits."""
    generator = torch.Generator().manual_seed(seed)
    return "".join(map(str, torch.randint(10, (num_tokens,), generator=generator).tolist()))
