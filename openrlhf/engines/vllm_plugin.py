"""Weight-transfer backends for vLLM, registered in every process of an engine as a vLLM plugin.

`openrlhf_shm` and `openrlhf_ray` take buckets out of shared memory, on CPUs and GPUs;
`openrlhf_nccl` and `openrlhf_ipc` are vLLM's own backends for GPUs, which keep a record of what
came through them. All of them answer a receipt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from openrlhf.engines.base import RAY_BACKEND, SHM_BACKEND, WeightBucket
from openrlhf.engines.shared_memory import ShmBucketReader, checked_part, checksum
from openrlhf.engines.vllm_held import HeldBits, SentBits, held_bits
from openrlhf.engines.vllm_logprobs import report_full_logprobs
from openrlhf.engines.vllm_weights import (
    InPlaceUpdate,
    LayerwiseUpdate,
    ModelUpdate,
    is_tied_copy,
)
from openrlhf.errors import WeightSyncError
from openrlhf.utils.tensors import fingerprint

BACKENDS = {
    SHM_BACKEND: "SharedMemoryWeightTransferEngine",
    RAY_BACKEND: "SharedMemoryWeightTransferEngine",
    "openrlhf_nccl": "RecordingNCCLEngine",
    "openrlhf_ipc": "RecordingIPCEngine",
}
RECEIPT_EXTENSION = "openrlhf.engines.vllm_plugin.ReceiptExtension"


def register() -> None:
    """Make the backends known to vLLM; may be called again and again."""
    for name, class_name in BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, __name__, class_name)


@dataclass
class BucketInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """The fields of one WeightBucket."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    num_bytes: int
    handle: dict[str, object] = field(default_factory=dict)


class SharedMemoryWeightTransferEngine(WeightTransferEngine[BucketInitInfo, BucketUpdateInfo]):
    """Reads buckets where the trainer wrote them and loads them into the model of this worker."""

    init_info_cls = BucketInitInfo
    update_info_cls = BucketUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reader = ShmBucketReader()
        self.fingerprints: dict[str, int] = {}
        self.sent: SentBits | None = None  # None: the update itself proves what is held
        is_whole = self.parallel_config.world_size == 1
        self.is_in_place = self.device.type == "cpu" and is_whole
        self.update: ModelUpdate = (InPlaceUpdate if self.is_in_place else LayerwiseUpdate)(
            self.model, self.model_config
        )

    def init_transfer_engine(self, init_info: BucketInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Get ready for the first bucket, also after an update that was given up half way."""
        self.fingerprints = {}
        self.sent = None if self.is_in_place else SentBits()
        self.update.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket; vLLM's own version waits for an accelerator, which need not be there."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """Load the tensors of one bucket and remember their fingerprints."""
        bucket = WeightBucket(**vars(update_info))
        self.update.load(self._noted(self.reader.read(bucket), checked_part(bucket)))

    def _noted(
        self, tensors: Iterable[tuple[str, Tensor]], part: int | None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name in self.fingerprints:
                raise WeightSyncError(f"tensor {name} came twice")
            self.fingerprints[name] = checksum(tensor, part)
            if self.sent is not None and not is_tied_copy(name, self.model_config):
                self.sent.add(tensor)
            yield name, tensor

    def finish_weight_update(self) -> None:
        """Make the weights live; raises WeightSyncError when they are not all there."""
        self.update.finish(tuple(self.fingerprints))

    def shutdown(self) -> None:
        """Let go of the shared memory."""
        self.reader.close()


class _Recorder:
    """Stands in for the model while vLLM's own backend loads it, and notes what came."""

    def __init__(self, model: torch.nn.Module, engine: _Recording) -> None:
        self.model = model
        self.engine = engine

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object:
        return self.model.load_weights(self._noted(weights))

    def _noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self.engine.fingerprints[name] = fingerprint(tensor)
            if not is_tied_copy(name, self.engine.model_config):
                self.engine.sent.add(tensor)
            yield name, tensor


class _Recording:
    """Adds a receipt to one of vLLM's own backends."""

    fingerprints: dict[str, int]
    sent: SentBits
    model: Any
    model_config: Any

    def start_weight_update(self) -> None:
        self.fingerprints, self.sent = {}, SentBits()
        super().start_weight_update()  # type: ignore[misc]

    def receive_weights(self, update_info: Any) -> None:
        model = self.model
        self.model = _Recorder(model, self)
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self.model = model


class RecordingNCCLEngine(_Recording, NCCLWeightTransferEngine):
    """vLLM's NCCL backend with a receipt."""


class RecordingIPCEngine(_Recording, IPCWeightTransferEngine):
    """vLLM's CUDA-IPC backend with a receipt."""


class ReceiptExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`), to be called by name in every worker."""

    def abandon_weight_update(self) -> None:
        """Forget an update that failed or was never finished, so that a new one can begin."""
        self._weight_update_active = False

    def weight_fingerprints(self) -> dict[str, int]:
        """Fingerprints of all tensors received in the last update, by Hugging Face name."""
        return self.weight_transfer_engine.fingerprints  # type: ignore[attr-defined]

    def held_bits(self) -> HeldBits | None:
        """What the live parameters hold and should hold; None where that cannot be compared."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        if engine.sent is None:  # the update has looked for itself
            return HeldBits(0, 0, 0)
        return held_bits(engine.model, engine.sent)

    def report_full_logprobs(self) -> bool:
        """Report log-probs as they are before top-p; answers whether this vLLM can."""
        return report_full_logprobs(self.model_runner.sampler)  # type: ignore[attr-defined]
