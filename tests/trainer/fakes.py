"""Engines, a stream and a trainer in which samples take the time they are told to take."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from openrlhf.commands.rl_inputs import planned_updates
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.checkpoints import DataIdentity, RunCheckpoints
from openrlhf.engines.base import SamplingSettings
from openrlhf.errors import RewardError
from openrlhf.rollout.rollout import RolloutMaker, RolloutRequest, SampleBatch
from openrlhf.rollout.scoring import FailurePolicy, GroupScorer
from openrlhf.trainer.device_phases import DevicePhases
from openrlhf.trainer.ppo_state import RunState
from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.trainer.ppo_trainer_async import PPOTrainerAsync
from openrlhf.trainer.ppo_utils.update_plan import UpdateResult
from openrlhf.trainer.workers.model_worker import TrainedWorker
from openrlhf.trainer.workers.policy import PolicyModelActor
from openrlhf.utils.callbacks import Callback
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import PromptRecord
from openrlhf.utils.tracker import Tracker, read_metrics
from tests.helpers.rollouts import rollout

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
    train_error_at: int | None = None  # the trainer breaks in this update
    unscored: frozenset[str] = frozenset()  # tags of evaluations that get no rewards
    keeps_running: bool = False
    version: int = -1  # that the engines hold
    policy_version: int = 0
    running: set[Key] = field(default_factory=set)
    was_cancelled: bool = False  # while samples were made
    submitted: list[Key] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)  # samples of each update

    def receive_weights(self) -> None:
        assert self.keeps_running or not self.running, f"weights changed under {self.running}"
        self.version = self.policy_version


class FakeTurn:
    """Samples that are there `seconds_of` after they were asked for."""

    in_rounds = False

    def __init__(self, world: World) -> None:
        self.world = world

    async def samples_of(self, request: RolloutRequest) -> list:
        world, row = self.world, request.prompt.row_id
        key = (sum(made == row for _, made in world.submitted), row)  # episode, row
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
            score=score,
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
        [(steps, *_)] = shares
        self.world.trained += [step.num_samples for step in steps]
        return lambda: [UpdateResult(Metrics())]

    def call(self, method, *args, **options):
        assert method.__name__ == PolicyModelActor.broadcast_to_vllm.__name__
        self.world.receive_weights()
        return [{}]  # no engine has failed


class FakeRollouts(RolloutMaker):
    """Evaluation takes a moment and shares the engines."""

    def __init__(self, world: World) -> None:
        policy = FailurePolicy(step_size=1, drops=True, max_dropped=math.inf)
        super().__init__(FakeTurn(world), GroupScorer(None, policy))
        self.world = world

    def generate_samples(self, prompts, sampling, *, tag):
        version = self.world.version
        time.sleep(0.01)
        assert self.world.version == version == self.world.policy_version
        if tag in self.world.unscored:
            raise RewardError("the server is away")
        return SampleBatch(samples((0, 0), (0.0, 1.0), [version]), Metrics(), {})


class EndsAt(Callback):
    """Ends the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.step:
            trainer.end()


class Prompts(list):
    """Prompts of a file without a name."""

    def row_location(self, row_id: int) -> str:
        return f"row {row_id + 1}"


def make_trainer(
    world: World,
    *,
    num_prompts: int,
    queue_size: int = 1,
    num_at_once: int | None = None,
    with_filter: bool = False,
    num_episodes: int = 1,
    policy_dtype: torch.dtype = torch.float32,
    is_async: bool = True,
    callbacks: Sequence[Callback] = (),
) -> Any:
    """A trainer over fakes; `world` decides what happens. Any number may fail."""
    flags = (
        "--pretrain m --prompt_data d --remote_rm_url http://r --advantage_estimator rloo "
        "--n_samples_per_prompt 2 --micro_rollout_batch_size 2 --micro_train_batch_size 2 "
        "--rollout_batch_size 4 --train_batch_size 8 --init_kl_coef 0 "
        f"--eval_steps 3 --dynamic_filtering_max_empty 3 --num_episodes {num_episodes}"
    )
    flags += f" --async_train --async_queue_size {queue_size}" * is_async
    flags += " --partial_rollout" * world.keeps_running + " --dynamic_filtering" * with_filter
    flags += f" --vllm_generate_batch_size {num_at_once}" if num_at_once else ""
    config = parse_config(PPOConfig, flags.split()).config
    prompts = [
        PromptRecord(row, "", (), label=f"label {row}", datasource="d", columns={"row": row})
        for row in range(num_prompts)
    ]
    sampling, folder = SamplingSettings(num_samples=2), TemporaryDirectory()
    groups: dict[str, Any] = {"actor": FakeActor(world)}
    return (PPOTrainerAsync if is_async else PPOTrainer)(
        config,
        SimpleNamespace(  # type: ignore[arg-type]
            folder=folder,  # goes with the trainer
            run_dir=Path(folder.name),
            token_texts=lambda token_ids: [str(token_id) for token_id in token_ids],
            image_processor=None,
            prompts=Prompts(prompts),
            eval_prompts=prompts[:1],
            texts=None,
            sampling=sampling,
            eval_sampling=sampling,
            updates=planned_updates(config, num_prompts),
            pass_rate="eval/eval_default_pass1",
        ),
        SimpleNamespace(  # type: ignore[arg-type]
            groups=groups,
            engines=[SimpleNamespace(is_up=True, call=lambda *_: None)],
            policy_dtype=policy_dtype,
            recovery=None,
            updates_side_by_side=False,
        ),
        forwards={},
        maker=FakeRollouts(world),
        state=RunState(
            config,
            RunCheckpoints(config.ckpt, DataIdentity("prompts", num_prompts)),
            {},
            DevicePhases([], engines_sleep=False, training_sleeps=False),
        ),
        tracker=Tracker(folder.name),
        callbacks=callbacks,
    )


def steps_of(trainer: PPOTrainer) -> list[dict[str, float]]:
    """What was logged of every step."""
    path = trainer.tracker.path
    records = read_metrics(path) if path.exists() else []
    return [record for record in records if "reward" in record]


def staleness_histogram(trainer: PPOTrainer) -> Counter[int]:
    """How many samples were trained on at each staleness."""
    histogram: Counter[int] = Counter()
    for record in steps_of(trainer):
        for name, value in record.items():
            if name.startswith("num_samples/stale_"):
                histogram[int(name.rpartition("_")[2])] += int(value)
    return histogram
