"""The controller of a large run: its real loop, prompts, ledger, queue, dispatcher, shares and
plans, over ranks and engines that compute nothing, take their time, and are lost now and then.

OPENRLHF_SCALE_GROUPS and OPENRLHF_SCALE_STEPS change the size; 12,500 groups are 100,000 samples.
"""

import asyncio
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks.controller import BATCH_SIZE, NUM_ACTIONS, NUM_PROMPT, SAMPLES_A_PROMPT, StubGroup
from openrlhf.commands.rl_inputs import planned_updates
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.checkpoints import DataIdentity, RunCheckpoints
from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.errors import LostEngineError, LostRankError
from openrlhf.rollout.engine_pool import EnginePool
from openrlhf.rollout.rollout import RolloutMaker
from openrlhf.rollout.scoring import FailurePolicy, GroupScorer, Scorer
from openrlhf.trainer.device_phases import DevicePhases
from openrlhf.trainer.ppo_state import RunState
from openrlhf.trainer.ppo_trainer_async import PPOTrainerAsync
from openrlhf.trainer.ppo_utils.worker_group import Pending, start_forward
from openrlhf.trainer.workers.model_worker import TrainedWorker
from openrlhf.trainer.workers.policy import PolicyModelActor
from openrlhf.trainer.workers.weight_sync import SyncFailure
from openrlhf.utils.callbacks import Callback
from openrlhf.utils.rollout import PromptRecord, Rollout
from openrlhf.utils.tracker import Tracker
from tests.trainer.fakes import Prompts, steps_of

NUM_RANKS, NUM_ENGINES = 1_000, 64
NUM_GROUPS = int(os.environ.get("OPENRLHF_SCALE_GROUPS", "512"))  # of a step
NUM_STEPS = int(os.environ.get("OPENRLHF_SCALE_STEPS", "50"))
SAVE_STEPS = 4
DOWN_S = 0.2  # until there is another process
TOKENS = tuple(range(3, 3 + NUM_ACTIONS))
LOGPROBS = (-0.5,) * NUM_ACTIONS


@dataclass
class Chance:
    """How long things take and what is lost, from one seed; notes what happened."""

    draw: random.Random
    ranks_lost_in: set[int]  # versions of the policy, in whose updates it loses a rank
    version: int = 0
    sent: int = 0  # the version that engines hold
    waited_s: float = 0.0  # by the controller, for ranks
    num_engines_lost: int = 0
    num_ranks_lost: int = 0

    def lose_rank(self, role: str) -> None:
        self.num_ranks_lost += 1
        error = LostRankError(f"{role} rank 7 of {NUM_RANKS} died: pid 7 was killed by SIGKILL")
        error.role = role
        raise error


class StubEngine:
    """Samples after a moment, unless it is lost meanwhile."""

    waits_for = None

    def __init__(self, chance: Chance) -> None:
        self.chance, self.up_at_s = chance, 0.0

    @property
    def is_up(self) -> bool:
        return time.monotonic() >= self.up_at_s

    def lose(self, why: LostEngineError) -> None:
        self.up_at_s = time.monotonic() + DOWN_S
        self.chance.num_engines_lost += 1

    async def sample(self, request: GenerationRequest) -> list[Completion]:
        if self.is_up and self.chance.draw.random() < 0.002:
            self.lose(LostEngineError("killed"))
        version = self.chance.sent
        await asyncio.sleep(self.chance.draw.uniform(0.0, 0.05))
        if not self.is_up:
            raise LostEngineError("vllm-7 died: pid 7 was killed by SIGKILL")
        completion = Completion(TOKENS, LOGPROBS, "stop", version)
        return [completion] * request.sampling.num_samples


class StubScorer(Scorer):
    """Rewards come late, one group before another."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance

    async def score(self, groups: Sequence[Sequence[Rollout]]) -> list[list[Rollout]]:  # type: ignore[override]
        await asyncio.sleep(self.chance.draw.uniform(0.0, 0.02))
        return [[replace(r, reward=float(k)) for k, r in enumerate(group)] for group in groups]


@dataclass
class StubRanks(StubGroup):
    """A thousand ranks of a model, which take a moment."""

    role: str
    chance: Chance
    lost_in: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__(NUM_RANKS, NUM_GROUPS * SAMPLES_A_PROMPT)

    def start(self, method: Callable[..., Any], shares: Iterable[tuple[Any, ...]]) -> Pending:
        pending = super().start(method, shares)

        def wait() -> list[Any]:
            wait_s = self.chance.draw.uniform(0.0, 0.03)
            time.sleep(wait_s)
            self.chance.waited_s += wait_s
            if self.chance.version in self.lost_in:
                self.lost_in.remove(self.chance.version)
                self.chance.lose_rank(self.role)
            if method is TrainedWorker.fit:
                self.chance.version += 1
            return pending()

        return wait

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        if method is TrainedWorker.take_states:
            self.taken = Path(args[0], self.role), str(self.chance.version)
            return [{}]
        elif method is TrainedWorker.num_state_bytes:
            return [0]
        elif method is TrainedWorker.load_states:
            self.chance.version = int(Path(args[0], self.role).read_text())
            return [True]
        elif method is PolicyModelActor.broadcast_to_vllm:
            self.chance.sent = self.chance.version
            failed = [k for k in range(len(args[0])) if self.chance.draw.random() < 0.001]
            return [{k: SyncFailure("took no weights", is_lost=True) for k in failed}]
        return [None]

    def call_aside(self, method: Callable[..., Any]) -> list[str]:
        assert method is TrainedWorker.write_taken
        file, text = self.taken
        file.write_text(text)
        return [""]

    def start_again(self, why: LostRankError | None = None) -> int:
        if self.role == "actor":
            self.chance.version = 0
        time.sleep(DOWN_S)
        self.chance.waited_s += DOWN_S
        return 0


@dataclass
class Watcher(Callback):
    """Notes the memory of this process, and what the controller itself took."""

    chance: Chance
    rss: dict[int, float] = field(default_factory=dict)  # MiB
    seconds: list[float] = field(default_factory=list)

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.rss[step] = psutil.Process().memory_info().rss / 2**20
        own = metrics["timing/make_experience"] + metrics["timing/ppo_train"]
        self.seconds.append(own - self.chance.waited_s)
        self.chance.waited_s = 0.0


class Words:
    """A tokenizer of one word."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": []}

    def batch_decode(self, ids: Sequence[Sequence[int]], **_: object) -> list[str]:
        return ["a response" if each else "" for each in ids]


def large_run(folder: Path, chance: Chance, watcher: Watcher) -> PPOTrainerAsync:
    num_samples = NUM_GROUPS * SAMPLES_A_PROMPT
    flags = (
        "--pretrain m --prompt_data d --remote_rm_url http://r --advantage_estimator group_norm "
        f"--n_samples_per_prompt {SAMPLES_A_PROMPT} --rollout_batch_size {NUM_GROUPS} "
        f"--train_batch_size {min(BATCH_SIZE, num_samples)} --use_kl_loss --init_kl_coef 0.01 "
        f"--num_episodes {NUM_STEPS} --async_train --async_queue_size 1 --vllm_num_engines 64 "
        f"--save_path {folder}/run --ckpt_path {folder}/ckpt --save_steps {SAVE_STEPS} "
        "--micro_train_batch_size 1 --micro_rollout_batch_size 1 --rollout.num_kept_files 1"
    )
    config = parse_config(PPOConfig, flags.split()).config
    prompts = Prompts(
        PromptRecord(row, "a prompt", tuple(range(NUM_PROMPT))) for row in range(NUM_GROUPS)
    )
    policy = FailurePolicy(NUM_GROUPS, drops=True, max_dropped=math.inf)
    engines = [StubEngine(chance) for _ in range(NUM_ENGINES)]
    turns = EnginePool(engines, Words(), vocab_size=150_000)  # type: ignore[arg-type]
    actor = StubRanks("actor", chance, lost_in=chance.ranks_lost_in)
    ref = StubRanks("ref", chance, lost_in={3, NUM_STEPS // 2})
    forwards = {
        "old_logprobs": partial(start_forward, actor, StubGroup.result),
        "ref_logprobs": partial(start_forward, ref, StubGroup.result),
    }
    return PPOTrainerAsync(
        config,
        SimpleNamespace(  # type: ignore[arg-type]
            run_dir=folder / "run",
            token_texts=None,
            image_processor=None,
            prompts=prompts,
            eval_prompts=None,
            texts=None,
            sampling=SamplingSettings(num_samples=SAMPLES_A_PROMPT),
            updates=planned_updates(config, NUM_GROUPS),
            pass_rate="none",
        ),
        SimpleNamespace(  # type: ignore[arg-type]
            groups={"actor": actor, "ref": ref},
            engines=engines,
            policy_dtype=torch.float32,
            recovery=None,
            updates_side_by_side=False,
        ),
        forwards=forwards,
        maker=RolloutMaker(turns, GroupScorer(StubScorer(chance), policy)),
        state=RunState(
            config,
            RunCheckpoints(config.ckpt, DataIdentity("prompts", NUM_GROUPS)),
            {"actor": actor},
            DevicePhases([], engines_sleep=False, training_sleeps=False),
        ),
        tracker=Tracker(folder / "run"),
        callbacks=[watcher],
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_of_a_thousand_ranks_loses_no_sample_and_its_memory_is_flat(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    seed = int(os.environ.get("OPENRLHF_SOAK_SEED", time.time_ns() % 1000))
    draw = random.Random(seed)
    num_lost = max(NUM_STEPS // 10, 1)
    chance = Chance(draw, set(draw.sample(range(1, NUM_STEPS), num_lost)))
    watcher = Watcher(chance)
    trainer = large_run(tmp_path, chance, watcher)
    started_at = time.monotonic()
    trainer.fit()
    wall_s = time.monotonic() - started_at
    assert [step["step"] for step in steps_of(trainer)] == list(range(1, NUM_STEPS + 1))
    ledger = trainer.sampler.ledger
    assert ledger.outcomes == {"trained": NUM_GROUPS * NUM_STEPS} and not ledger.pending
    assert chance.version == trainer.state.weight_version == NUM_STEPS
    assert max(step["staleness_max"] for step in steps_of(trainer)) <= 1
    assert chance.num_ranks_lost >= num_lost and chance.num_engines_lost > 0
    rss = [mib for _, mib in sorted(watcher.rss.items())]
    early, late = max(rss[: NUM_STEPS // 2]), max(rss[NUM_STEPS // 2 :])
    num_samples = NUM_GROUPS * SAMPLES_A_PROMPT
    with capsys.disabled():
        own_s = sorted(watcher.seconds)[len(watcher.seconds) // 2]
        print(
            f"\nseed {seed}: {NUM_STEPS} steps of {num_samples} samples in {wall_s:.0f} s; lost: "
        )
        print(f"{chance.num_ranks_lost} ranks, {chance.num_engines_lost} engines")
        print(f"controller: {own_s:.2f} s a step, {own_s * 1e5 / num_samples:.1f} ms a 100 samples")
        print(f"memory: at most {early:.0f} MiB in the first half of the steps, then {late:.0f}")
    assert late < 1.1 * early
