"""A model that samples with its own `generate`, and takes weights in buckets as an engine does."""

from pathlib import Path

import torch
import transformers

from openrlhf.engines.base import (
    Completion,
    GenerationRequest,
    WeightBucket,
)
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.engines.weight_transfer import BucketReader
from openrlhf.utils.tensors import fingerprint


class ReceivingModel(OwnGenerate):
    who = "the engine"

    def __init__(self, path: Path | str, dtype: torch.dtype) -> None:
        super().__init__(
            transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        )
        self._reader = BucketReader(torch.device("cpu"))
        self._received: dict[str, int] = {}

    async def sample(self, request: GenerationRequest) -> list[Completion]:
        [answer] = self.generate([request])
        return answer

    def memory_locations(self) -> list[str]:
        return [memory.location for memory in self._reader.memories]

    def init_weight_transfer(self, init_info: dict[str, object]) -> None: ...

    def begin_weight_update(self, keep_running: bool) -> None:
        self._received = {}

    @torch.no_grad()
    def receive_bucket(self, bucket: WeightBucket) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in self._reader.read(bucket):
            parameters[name].copy_(tensor)
            self._received[name] = fingerprint(parameters[name])

    def finish_weight_update(self, weight_version: int) -> dict[str, int]:
        self._reader.close()
        self.weight_version = weight_version
        return self._received

    def sleep(self) -> None: ...

    def wake_up(self, tag: str) -> None: ...

    def shutdown(self) -> None: ...
