"""What every rank of every model shares: joining its group, forwards in micro-batches, memory
between phases.

Workers are plain classes. Ray wraps them in launcher.py; LocalGroup calls them directly.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import EvalEngine, TrainEngine
from openrlhf.models.kernels import check_here
from openrlhf.models.loading import LoadOptions
from openrlhf.trainer.ppo_utils.experience import Experience, scatter_back
from openrlhf.trainer.ppo_utils.replay_buffer import MicroBatchPlan
from openrlhf.trainer.ray.utils import node_address, own_gpu
from openrlhf.utils.logging import redirect_framework_logs
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.progress import Advance, counter

Worker = TypeVar("Worker")
Args = ParamSpec("Args")
Answer = TypeVar("Answer")


def frees_cache(
    method: Callable[Concatenate[Worker, Args], Answer],
) -> Callable[Concatenate[Worker, Args], Answer]:
    """Give cached device memory back after a method of a worker.

    Torch keeps freed memory for its own process; other roles and the engines on this device need
    it.
    """

    @wraps(method)
    def freeing(self: Worker, /, *args: Args.args, **kwargs: Args.kwargs) -> Answer:
        answer = method(self, *args, **kwargs)
        torch.cuda.empty_cache()
        return answer

    return freeing


@dataclass(frozen=True)
class RankIdentity:
    """The rank and the model of a worker."""

    role: str
    rank: int
    world_size: int
    run_dir: str


class Health(NamedTuple):
    """The progress of a process."""

    work: str | None  # what goes on step by step; None: nothing of that kind
    num_steps: int  # micro-batches of a rank, steps of an engine; since the start
    pid: int
    done_of: tuple[int, int | None] = (0, None)  # micro-batches of this work: done, and in all


class ModelWorker:
    """One rank of a model's group; subclasses add the model."""

    strategy: DeepSpeedStrategy
    engine: TrainEngine | EvalEngine
    work: str | None = None  # the loop over micro-batches that runs now
    num_micro_batches = 0  # done since the start
    done_of: tuple[int, int | None] = (0, None)  # micro-batches of this loop: done, and in all

    def __init__(self, config: PPOConfig, identity: RankIdentity) -> None:
        self.config = config
        self.identity = identity

    def master_endpoint(self) -> tuple[str, int]:
        """Address and a free port for the group's rendezvous (asked of rank 0)."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return node_address(), probe.getsockname()[1]

    def join(self, host: str, port: int) -> str:
        """Set up this process as its rank of the group; every rank must call it.

        Answers the address of the node it runs on.
        """
        identity = self.identity
        name = f"{identity.role}-{identity.rank}"
        redirect_framework_logs(identity.run_dir, name, capture_streams=True)
        os.environ.update(
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
            RANK=str(identity.rank),
            WORLD_SIZE=str(identity.world_size),
            LOCAL_RANK=str(own_gpu()),
        )
        self.setup()
        return node_address()

    def health(self) -> Health:
        """Return how far this rank is; may be called while it works."""
        return Health(self.work, self.num_micro_batches, os.getpid(), self.done_of)

    @contextmanager
    def working(self, what: str, total: int | None = None) -> Iterator[Advance]:
        """Announce a loop over micro-batches, with a bar; yield the function that counts them."""
        self.work, self.done_of = what, (0, total)
        with counter(what, total) as show:

            def advance(num_done: int = 1, total: int | None = None) -> None:
                self.num_micro_batches += num_done
                self.done_of = (self.done_of[0] + num_done, total or self.done_of[1])
                show(*self.done_of)

            try:
                yield advance
            finally:
                self.work = None

    def setup(self) -> None:
        """Start the distributed runtime in a process that already knows its rank."""
        self.strategy = DeepSpeedStrategy(
            self.config.ds,
            seed=self.config.train.seed,
            full_determinism=self.config.train.full_determinism_enable,
            local_rank=self.config.local_rank,
            rank_timeout_s=self.config.train.rank_timeout_s,
        )
        self.strategy.setup()
        is_cuda = self.strategy.device.type == "cuda"
        check_here(self.config.ds, is_cuda=is_cuda)

    @property
    def load_options(self) -> LoadOptions:
        """Return the options by which models of this run are loaded."""
        ds = self.config.ds
        return {
            "attn_implementation": ds.attention,
            "dtype": ds.param_dtype,
            "trust_remote_code": self.config.trust_remote_code,
            "load_in_4bit": ds.load_in_4bit,
            "experts_implementation": ds.experts_implementation,
            "use_liger_kernel": ds.use_liger_kernel,
        }

    def offload_states(self) -> None:
        """Move training states to CPU memory."""
        self.engine.offload_states()

    def reload_states(self) -> None:
        """Bring training states back."""
        self.engine.reload_states()

    @property
    def rollout_plan(self) -> MicroBatchPlan:
        """Micro-batches of forwards without gradients."""
        train = self.config.train
        budget = self.config.rollout.max_tokens_per_gpu or train.max_tokens_per_gpu
        return self._plan(self.config.rollout.micro_batch_size, budget)

    @property
    def train_plan(self) -> MicroBatchPlan:
        """Micro-batches of updates."""
        train = self.config.train
        return self._plan(train.micro_batch_size, train.max_tokens_per_gpu)

    def _plan(self, micro_batch_size: int, max_tokens_per_gpu: int) -> MicroBatchPlan:
        budget = max_tokens_per_gpu * self.config.ds.ring_attn_size
        is_used = self.config.train.dynamic_batch_enable
        return MicroBatchPlan(micro_batch_size, budget if is_used else None)

    @frees_cache
    @torch.no_grad()
    def forward_in_micro_batches(
        self, experience: Experience, forward: Callable[[PackedBatch], Tensor], *, what: str
    ) -> Tensor:
        """Run `forward` over a share and lay the results end to end in its order, on the CPU;
        `what` names them on a bar.

        Ranks with fewer micro-batches run empty ones: under ZeRO-3 a forward is a collective.
        """
        parts = self.rollout_plan.cut(experience.seq_lengths.tolist())
        count = int(self.strategy.all_reduce_max({"n": float(len(parts))})["n"])
        outputs: list[Tensor] = []
        with self.working(what, count) as advance:
            for k in range(count):
                batch = experience.select(parts[k]) if k < len(parts) else experience.stand_in()
                outputs.append(forward(batch.packed().to(self.engine.device)).cpu())
                advance()
        if not parts:
            return torch.zeros(0)
        outputs = outputs[: len(parts)]
        is_per_sample = all(len(out) == len(part) for out, part in zip(outputs, parts, strict=True))
        sizes = torch.ones_like(experience.num_actions) if is_per_sample else experience.num_actions
        return scatter_back(outputs, parts, sizes)
