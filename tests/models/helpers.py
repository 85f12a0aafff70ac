"""Ragged batches and the slow, obvious way to compute what the packed models compute."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from torch import Tensor

from openrlhf.config.common import DeepSpeedConfig
from openrlhf.models.value_head import RewardModel
from openrlhf.utils.packing import PackedBatch
from tests.tiny import make_model

FAMILIES = ("gemma", "gemma2", "gpt_neox", "llama", "mistral", "mixtral", "qwen2", "qwen3")
# Small windows, so that the short sequences of tests reach past them.
OVERRIDES = {
    "mistral": {"sliding_window": 7},
    "gemma2": {"sliding_window": 9, "final_logit_softcapping": 2.0},
}


def tiny_model(path: Path, architecture: str, **overrides: object) -> Path:
    """A tiny model of the family, with weights large enough to give real attention."""
    options = {"hidden_size": 32, "initializer_range": 0.2, **OVERRIDES.get(architecture, {})}
    return make_model(path / architecture, architecture, **options | overrides)


def command(**ds: object) -> SimpleNamespace:
    """A command whose models are loaded like this."""
    return SimpleNamespace(ds=DeepSpeedConfig(**ds), trust_remote_code=False)


def random_sequences(lengths: Sequence[int], *, seed: int = 0) -> list[Tensor]:
    """Random ids of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, 262, (n,), generator=generator) for n in lengths]


def random_lengths(num: int, longest: int, *, seed: int = 0) -> list[int]:
    """Lengths from 1 to `longest`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, longest + 1, (num,), generator=generator).tolist()


def random_masks(sequences: Sequence[Tensor], *, seed: int = 0) -> list[Tensor]:
    """Targets after a random prompt, often an empty response; every fifth row has no target."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    for i, ids in enumerate(sequences):
        num_prompt = int(torch.randint(1, len(ids) + 1, (1,), generator=generator))
        mask = torch.arange(len(ids)) >= num_prompt
        masks.append(mask & (i % 5 != 4))
    return masks


def full_batch(sequences: Sequence[Tensor]) -> PackedBatch:
    """A batch in which every token but the first of a sequence is a target."""
    masks = [torch.arange(len(ids), device=ids.device) > 0 for ids in sequences]
    return PackedBatch.from_sequences(sequences, masks)


def eager_model(path: Path) -> transformers.PreTrainedModel:
    """The model as Hugging Face runs it without any fast kernel."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def dense_logprobs(
    model: torch.nn.Module, sequences: Sequence[Tensor], masks: Sequence[Tensor], temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the targets, one sequence at a time, from all logits."""
    logprobs, entropies = [], []
    for ids, mask in zip(sequences, masks, strict=True):
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / temperature
        logprobs_TV = logits.log_softmax(-1)[:-1]
        entropies.append(-(logprobs_TV.exp() * logprobs_TV).sum(-1)[mask[1:]])
        logprobs.append(logprobs_TV.gather(1, ids[1:, None]).squeeze(1)[mask[1:]])
    return torch.cat(logprobs), torch.cat(entropies)


def scores_of(
    model: torch.nn.Module, rows: Sequence[Sequence[int]], *, normalize_reward: bool = False
) -> Tensor:
    """What a reward model says of token ids, as the trainer asks it."""
    ids = [torch.tensor(row) for row in rows]
    batch = PackedBatch.from_sequences(ids, [torch.zeros(len(row)) for row in rows])
    with torch.no_grad():
        return RewardModel(model, normalize_reward=normalize_reward).eval()(batch).scores


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradient of every parameter by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
