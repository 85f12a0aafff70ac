"""Engines, a stream and a trainer in which samples take the time they are told to take."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from openrlhf.config.ppo import PPOConfig
from openrlhf.engines.base import SamplingSettings
from openrlhf.errors import RewardError
from openrlhf.rollout.rollout import RolloutRequest, Rollouts, SampleBatch
from openrlhf.rollout.scoring import FailurePolicy, GroupScorer
from openrlhf.trainer.ppo_setup import planned_updates
from openrlhf.trainer.ppo_trainer_async import PPOTrainerAsync
from openrlhf.trainer.ppo_utils.experience_maker import (
    RemoteExperienceMaker,
)
from openrlhf.trainer.ray.model_actor import TrainedWorker
from openrlhf.trainer.ray.phases import DevicePhases
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.utils.metrics import Metrics
from tests.trainer.test_experience import rollout

Key = tuple[int, int]
NUM_TOKENS = 4


@dataclass
class World:
    """What the fakes share: the engines' weights, how long things take, what happened."""

    seconds_of: Callable[[Key], float] = lambda key: 0.0
    scores_of: Callable[[Key], Sequence[float]] = lambda key: (0.0, 1.0)
    failing: frozenset[Key] = frozenset()
    train_s: float = 0.0
    may_train: Callable[[], bool] = lambda: True  # an update lasts until then
    error_at: Key | None = None  # the stream breaks when it comes to this group
    train_error_at: int | None = None  # the trainer breaks in this update
    keeps_running: bool = False
    version: int = -1  # that the engines hold
    policy_version: int = 0
    running: set[Key] = field(default_factory=set)
    num_evaluations: int = 0
    was_cancelled: bool = False  # while samples were made
    submitted: list[Key] = field(default_factory=list)

    def receive_weights(self) -> None:
        assert self.keeps_running or not self.running, f"weights changed under {self.running}"
        self.version = self.policy_version


class FakeTurn:
    """Samples that are there `seconds_of` after they were asked for."""

    in_rounds = False

    def __init__(self, world: World) -> None:
        self.world = world

    async def act(self, request: RolloutRequest) -> list:
        episode, row = request.name.removeprefix("episode").split("/")
        world, key = self.world, (int(episode), int(row))
        assert world.version >= 0, "the engines have no weights yet"
        world.submitted.append(key)
        world.running.add(key)
        started_under = world.version
        try:
            await asyncio.sleep(world.seconds_of(key))
        except asyncio.CancelledError:
            world.was_cancelled = True
            raise
        finally:
            world.running.remove(key)
        if key == world.error_at:
            raise ValueError("the stream broke")
        request.metrics.add("num_generated_tokens", NUM_TOKENS, reduction="sum")
        if key in world.failing:
            raise RewardError("no reward")
        versions = [started_under, started_under, world.version, world.version]
        return samples(key, world.scores_of(key), versions)

    def describe(self) -> str:
        return f"{len(self.world.running)} with the fake engine"


def samples(key: Key, scores: Sequence[float], versions: Sequence[int]) -> list:
    return [
        replace(
            rollout([5], [6] * NUM_TOKENS, reward=score, group=17),
            sample_id=f"{key}/{k}",
            row_id=key[1],
            weight_versions=torch.tensor(versions, dtype=torch.int32),
        )
        for k, score in enumerate(scores)
    ]


class TrainerBroke(Exception):
    """Ends a run in the middle of a training step."""


@dataclass
class FakeActor:
    """Trains for `train_s`; has one rank."""

    world: World
    num_shares: int = 1

    def start(self, method, shares):
        assert method is TrainedWorker.fit
        time.sleep(self.world.train_s)
        while not self.world.may_train():
            time.sleep(0.001)
        if self.world.train_error_at == self.world.policy_version:
            raise TrainerBroke
        self.world.policy_version += 1
        return lambda: [Metrics() for _ in shares]

    def call(self, method, *args, **options):
        assert method.__name__ == PolicyModelActor.broadcast_to_vllm.__name__
        self.world.receive_weights()


class FakeRollouts(Rollouts):
    """Evaluation takes a moment and shares the engines."""

    def __init__(self, world: World) -> None:
        policy = FailurePolicy(step_size=1, drops=True, max_dropped=math.inf)
        super().__init__(FakeTurn(world), GroupScorer(None, policy))
        self.world = world

    def generate_samples(self, prompts, sampling, *, tag):
        version = self.world.version
        time.sleep(0.01)
        assert self.world.version == version == self.world.policy_version
        self.world.num_evaluations += 1
        return SampleBatch(samples((0, 0), (0.0, 1.0), [version]), Metrics(), {})


class Records:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, step: int, values: dict[str, float]) -> None:
        if "reward" in values:
            self.steps.append(dict(values))

    def close(self) -> None: ...


def make_trainer(
    world: World,
    *,
    num_prompts: int,
    batch_size: int = 4,
    queue_size: int = 1,
    num_at_once: int | None = None,
    with_filter: bool = False,
    wait_s: float = 10.0,
    num_warm_up: int = 0,
    max_dropped: float | None = None,
    policy_dtype: torch.dtype = torch.float32,
    **train: object,
) -> PPOTrainerAsync:
    """An asynchronous trainer over fakes; `world` decides what happens. `max_dropped` unset: any
    number may fail.
    """
    drops = {} if max_dropped is None else {"failure": "drop_group", "max_dropped": max_dropped}
    config = PPOConfig.model_validate(
        {
            "rollout": {
                "batch_size": batch_size,
                "n_samples_per_prompt": 2,
                "vllm_generate_batch_size": num_at_once,
                "micro_batch_size": 2,
            },
            "train": {
                "batch_size": 2 * batch_size,
                "micro_batch_size": 2,
                "async_enable": True,
                "async_queue_size": queue_size,
                "partial_rollout_enable": world.keeps_running,
                **train,
            },
            "critic": {"freezing_steps": num_warm_up},
            "eval": {"steps": 3},
            "actor": {"model_name_or_path": "m"},
            "data": {"prompt_dataset": "d"},
            "reward": {"remote_url": "http://r", **drops},
            "algo": {
                "dynamic_filtering_enable": with_filter,
                "dynamic_filtering_max_empty": 3,
            },
        }
    )
    prompts = [
        SimpleNamespace(row_id=row, label=f"label {row}", datasource="d", columns={"row": row})
        for row in range(num_prompts)
    ]
    sampling = SamplingSettings(num_samples=2)
    groups: dict[str, Any] = {"actor": FakeActor(world)}
    if num_warm_up:
        groups["critic"] = SimpleNamespace(num_shares=1, start=lambda *_: lambda: [Metrics()])
    trainer = PPOTrainerAsync(
        config,
        SimpleNamespace(  # type: ignore[arg-type]
            run_dir="unused",
            prompts=prompts,
            eval_prompts=prompts[:1],
            texts=None,
            sampling=sampling,
            eval_sampling=sampling,
            updates=planned_updates(config, num_prompts),
            best_metric=None,
        ),
        SimpleNamespace(  # type: ignore[arg-type]
            groups=groups, engines=["engine"], policy_dtype=policy_dtype
        ),
        rollouts=FakeRollouts(world),
        phases=DevicePhases([], engines_sleep=False, training_sleeps=False),
        checkpoints=SimpleNamespace(  # type: ignore[arg-type]
            is_due=lambda state, is_last: False,
            opened=SimpleNamespace(store=SimpleNamespace(find=lambda step: None)),
        ),
        tracker=Records(),  # type: ignore[arg-type]
    )
    rloo = {"advantage": {"estimator": "rloo"}, "kl": {"init_coef": 0}}
    trainer.experience_maker = RemoteExperienceMaker(PPOConfig.model_validate({"algo": rloo}), {})
    trainer.rollout_writer = SimpleNamespace(write=lambda step, rows: None)  # type: ignore[assignment]
    trainer.queue.wait_s = wait_s
    return trainer


def steps_of(trainer: PPOTrainerAsync) -> list[dict[str, float]]:
    """What was logged of every step."""
    return trainer.tracker.steps  # type: ignore[attr-defined]


def staleness_histogram(trainer: PPOTrainerAsync) -> Counter[int]:
    """How many samples were trained on at each staleness."""
    histogram: Counter[int] = Counter()
    for record in steps_of(trainer):
        for name, value in record.items():
            if name.startswith("num_samples/stale_"):
                histogram[int(name.rpartition("_")[2])] += int(value)
    return histogram
