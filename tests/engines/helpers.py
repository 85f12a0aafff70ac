"""What the tests of all engines share: requests, weights in buckets, Hugging Face as reference."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from openrlhf.engines.base import (
    Completion,
    GenerationRequest,
    SamplingSettings,
    WeightBucket,
)
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.trainer.workers.weight_sync import HandleTransport

PROMPT = tuple(range(20, 60))


def request(prompt: Sequence[int] = PROMPT, **sampling: Any) -> GenerationRequest:
    return GenerationRequest("r", tuple(prompt), SamplingSettings(**sampling))


def start(path: Path, **settings: Any) -> VLLMEngine:
    """A small vLLM engine in this process."""
    small = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 32}
    return VLLMEngine({"model": str(path), **small, **settings})


def load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def greedy(model: Any, num_tokens: int = 24, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
    """Greedy tokens by recomputing the whole sequence for every token."""
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def engine_greedy(engine: VLLMEngine, num_tokens: int = 24) -> tuple[int, ...]:
    [[answer]] = engine.generate([request(temperature=0.0, max_new_tokens=num_tokens)])
    return answer.token_ids


def reference_logprobs(
    model: Any, prompt: Sequence[int], answer: Completion, temperature: float
) -> Tensor:
    """Log-probs (A,) of the sampled tokens in one forward pass, fp32."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0] / temperature
    targets = torch.tensor(answer.token_ids)
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, targets[:, None]).squeeze(-1)


def largest_gap(model: Any, prompt: Sequence[int], answer: Completion, temperature: float) -> float:
    expected = reference_logprobs(model, prompt, answer, temperature)
    return float((expected - torch.tensor(answer.logprobs)).abs().max())


def shake(model: Any, seed: int) -> None:
    """Visibly different weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def weights(model: Any) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def buckets(tensors: Sequence[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """The tensors in shared memory."""
    transport = HandleTransport(torch.device("cpu"), [])  # no engine is called
    transport.is_used = True
    transport.bucket_bytes = bucket_bytes
    for bucket, _ in transport.buckets(tensors):
        yield bucket


def send(
    engine: VLLMEngine,
    tensors: Sequence[tuple[str, Tensor]],
    version: int,
    *,
    bucket_bytes: int = 2**20,
    keep_running: bool = False,
) -> dict[str, int]:
    engine.begin_weight_update(keep_running)
    for bucket in buckets(tensors, bucket_bytes):
        engine.receive_bucket(bucket)
    return engine.finish_weight_update(version)


@contextmanager
def restored(engine: VLLMEngine, model: Any, version: int) -> Iterator[None]:
    """Whatever the block does to a shared engine, it holds these weights afterwards."""
    try:
        yield
    finally:
        send(engine, weights(model), version)
