"""The engine's side of a weight update, in every worker: vLLM's layerwise reload and a receipt.

An update is complete or it fails: no tensor may come twice, be unknown or be missing. vLLM imports
this module in every worker, for `WORKER_EXTENSION`, and finds the backend registered then.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from openrlhf.engines import vllm_cpu
from openrlhf.engines.weight_transfer import Broadcasts, BucketReader, synchronize
from openrlhf.errors import EngineError, WeightSyncError
from openrlhf.utils.tensors import bit_sum, both_sums, read_sums

# It warns of layers without weights, such as rotary embeddings; what is missing is raised here.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

BACKEND = "openrlhf"
WORKER_EXTENSION = "openrlhf.engines.weight_receiver.ReceiptExtension"


class WeightReceiver(WeightTransferEngine[Any, Any]):
    """Receives buckets and loads them into the model of this worker."""

    init_info_cls = dict
    update_info_cls = dict

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reader = BucketReader(self.device)
        self.expected: list[str] = []  # parameters that an update has to fill
        self.loaded: set[str] = set()  # those that it has
        self.sums: dict[str, Tensor] = {}  # by the trainer's name
        self.fingerprints: dict[str, int] = {}  # the same once the update is whole
        self.received: dict[str, tuple[str, torch.dtype]] = {}  # by vLLM's name
        self.problem: str | None = None  # of the last transfer

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's group; a `problem` if that is broken off."""
        device = self.device if init_info["device_type"] == "cuda" else torch.device("cpu")
        own_rank = init_info["rank_offset"] + self.parallel_config.rank
        host, port, world_size = (init_info[name] for name in ("host", "port", "world_size"))
        with self._noting_problem():
            group = Broadcasts(host, port, rank=own_rank, world_size=world_size)
            self.reader.join(group.join(device), device)

    def start_weight_update(self) -> None:
        """Begin an update; one that was broken off is forgotten first."""
        for layer in self.model.modules():
            if (info := get_layerwise_info(layer)).can_load():
                _place_kernel_tensors(layer, info)
                info.reset()
        self.sums, self.fingerprints, self.received, self.loaded = {}, {}, {}, set()
        initialize_layerwise_reload(self.model)
        vllm_cpu.before_reload(self.model)
        self.expected = [name for name, _ in self.model.named_parameters()]

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket and wait until it has been read."""
        self.receive_weights(update_info)
        synchronize(self.device)

    @torch.no_grad()
    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Load the tensors of one bucket and note what came; a `problem` if it is broken off."""
        try:
            with self._noting_problem():
                tensors = self._noted(self.reader.read(update_info["bucket"]))
                self.loaded.update(self.model.load_weights(tensors))
        except (ValueError, KeyError, AttributeError, AssertionError) as error:
            name = next(reversed(self.sums), "the first tensor")
            why = str(error) or type(error).__name__  # asserts of vLLM's layers say nothing
            raise WeightSyncError(f"the engine cannot load {name}: {why}") from error
        for layer in self.model.modules():
            _own_pending(layer)

    def finish_weight_update(self) -> None:
        """Make the weights live; raise WeightSyncError when some are missing."""
        self.reader.close()
        finalize_layerwise_reload(self.model, self.model_config)
        vllm_cpu.after_reload(self.model)
        # Of Qwen3-VL: added in every step, and lost in a sleep, for they are no buffers of torch's.
        with torch.inference_mode():  # as an engine that has run may have made them
            for vectors in getattr(self.model, "deepstack_input_embeds", None) or ():
                vectors.zero_()
        if absent := self._absent():
            raise WeightSyncError(f"incomplete update: {len(absent)} missing, e.g. {absent[0]}")
        self._check_held()

    def shutdown(self) -> None:
        """Let go of the trainer's memory."""
        self.reader.close()

    @contextmanager
    def _noting_problem(self) -> Iterator[None]:
        self.problem = None
        try:
            yield
        except EngineError as error:
            self.problem = str(error)

    def _check_held(self) -> None:
        """Raise WeightSyncError for a plain parameter that does not hold the bits that came.

        A parameter is left out where its layer is packed or split over workers, its tensors have
        other names, or its loader changes values.
        """
        sums = dict(zip(self.sums, read_sums([*self.sums.values()]), strict=True))
        self.fingerprints = {name: both.fingerprint for name, both in sums.items()}
        names, held, sent = [], [], []
        for layer_name, layer in self.model.named_modules():
            for leaf, param in layer._parameters.items():
                if param is None or not _keeps_bits(layer, param):
                    continue
                sources = self._sources(f"{layer_name}.{leaf}")
                found = [self.received[source] for source in sources if source in self.received]
                if [dtype for _, dtype in found] != [param.dtype] * len(sources):
                    continue
                is_table = isinstance(layer, VocabParallelEmbedding)
                num_rows = layer.shard_indices.num_org_elements if is_table else None
                names.append(f"{layer_name}.{leaf}")
                held.append(bit_sum(param.data[:num_rows]))  # the rows that a checkpoint has
                sent.append(sum(sums[name].bit_sum for name, _ in found) % 2**64)
        for name, own, came in zip(
            names, torch.stack(held).tolist() if held else [], sent, strict=True
        ):
            if own % 2**64 != came:
                raise WeightSyncError(f"{name} does not hold what was received")

    def _sources(self, name: str) -> list[str]:
        """Return the tensors of a checkpoint that vLLM makes one parameter from."""
        merged = getattr(self.model, "packed_modules_mapping", None) or {}
        *prefix, module, leaf = name.rsplit(".", 2)
        return [".".join([*prefix, part, leaf]) for part in merged.get(module, [module])]

    def _noted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        own_name = namer(self.model)
        for name, tensor in tensors:
            if name in self.sums:
                raise WeightSyncError(f"tensor {name} came twice")
            self.sums[name] = both_sums(tensor)
            self.received[own_name(name)] = (name, tensor.dtype)
            yield name, tensor

    def _absent(self) -> list[str]:
        """Return the gaps of an update: parameters that nothing was loaded into, and tensors of a
        parameter that others came for.
        """
        # Of a vision-language model, the config of the whole may be the one that says so.
        configs = (self.model_config.hf_text_config, self.model_config.hf_config)
        is_tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
        absent = []
        for name in self.expected:
            sources = self._sources(name)
            came = self.received.keys() & sources
            is_tied_head = is_tied and name.rpartition(".")[0].endswith(("lm_head", "embed_out"))
            if came:
                absent += [source for source in sources if source not in came]
            elif name not in self.loaded and not is_tied_head:
                absent.append(name)
        return absent


WeightTransferEngineFactory.register_engine(BACKEND, __name__, WeightReceiver.__name__)


class FullLogprobs(nn.Module):
    """Stands before the top-p step of vLLM's first model runner and takes log-probs there.

    vLLM has two modes: before the temperature, or after top-p. The trainer computes what lies
    between them. Drop this when vLLM has such a mode.
    """

    def __init__(self, top_p_step: Any) -> None:
        super().__init__()
        self.top_p_step = top_p_step
        top_p_step.logprobs_mode = "raw_logprobs"  # it need not compute any itself

    def forward(self, logits_RV: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        """Sampled tokens (R,) and log-probs (R, V) of the logits that came in."""
        logprobs_RV = logits_RV.log_softmax(dim=-1, dtype=torch.float32)
        sampled_R, _ = self.top_p_step(logits_RV, *args)  # may change the logits in place
        return sampled_R, logprobs_RV


def report_full_logprobs(sampler: Any) -> None:
    """Make a sampler report log-probs as they are before top-p; those of both model runners of vLLM
    0.32 are known. Raise EngineError for another one.
    """
    if hasattr(sampler, "topk_topp_sampler"):
        sampler.topk_topp_sampler = FullLogprobs(sampler.topk_topp_sampler)
        return
    if not hasattr(sampler, "_sample_random"):
        raise EngineError(
            f"vLLM samples by {type(sampler).__name__}, and how to get log-probs before top-p from "
            "it is not known. Install vLLM 0.32."
        )
    sample = sampler._sample_random

    def sample_and_keep_logits(logits_RV: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        whole_RV = logits_RV.clone()
        sampled_R, _ = sample(logits_RV, *args)
        return sampled_R, whole_RV

    sampler._sample_random = sample_and_keep_logits


class ReceiptExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`), to be called by name in every worker."""

    def break_off_weight_update(self) -> None:
        """Let another update begin, after one that was not finished."""
        self._weight_update_active = False

    def transfer_problem(self) -> str | None:
        """Return the error that broke the last transfer off; None without one."""
        return self.weight_transfer_engine.problem  # type: ignore[attr-defined, no-any-return]

    def memory_locations(self) -> list[str]:
        """Return the node and the GPU whose memory this worker can open."""
        engine: WeightReceiver = self.weight_transfer_engine  # type: ignore[attr-defined]
        return [memory.location for memory in engine.reader.memories]

    def weight_receipt(self) -> dict[str, int]:
        """Return the fingerprints of the tensors received in the last update, by name."""
        return self.weight_transfer_engine.fingerprints  # type: ignore[attr-defined, no-any-return]

    def report_full_logprobs(self) -> None:
        """Report log-probs as they are before top-p."""
        report_full_logprobs(self.model_runner.sampler)  # type: ignore[attr-defined]


def namer(model: nn.Module) -> Callable[[str], str]:
    """Return the function that gives a tensor of a checkpoint the name of its part in vLLM's
    model, before parts are merged: a family with a tower nests its language model otherwise.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    renamed = replace(mapper, orig_to_new_stacked={}).map_name
    return lambda name: renamed(name) or name


def _own_pending(layer: nn.Module) -> None:
    """Copy what vLLM holds back for an incomplete layer: the buffer is used again."""
    for _, bound in get_layerwise_info(layer).loaded_weights:
        for key, value in bound.arguments.items():
            if isinstance(value, Tensor) and key != "param" and not value.is_meta:
                bound.arguments[key] = value.clone()


def _keeps_bits(layer: nn.Module, param: Any) -> bool:
    """Return True if the parameter is plain and whole, and its loader copies values as they are."""
    loader = getattr(param, "weight_loader", default_weight_loader)
    owner = getattr(loader, "__self__", None)
    is_copied = loader is default_weight_loader or isinstance(
        owner, (LinearBase, VocabParallelEmbedding)
    )
    return is_copied and param.numel() > 0 and getattr(layer, "tp_size", 1) == 1
