"""A trainer whose ranks are lost goes back to its last checkpoint: every step is made once in the
end, every prompt trained on once.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.checkpoints import DataFacts, RunCheckpoints
from openrlhf.errors import LostRankError
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.worker_group import start_forward
from openrlhf.trainer.workers.critic_and_frozen import ReferenceModelActor
from openrlhf.trainer.workers.model_worker import TrainedWorker
from openrlhf.utils.callbacks import Callback
from tests.helpers.rollouts import rollout
from tests.trainer.fakes import FakeActor, World, make_trainer, staleness_histogram, steps_of


def lost(role: str) -> LostRankError:
    error = LostRankError(f"{role} rank 0 of 1 died: pid 7 was killed by SIGKILL")
    error.role = role
    return error


@dataclass
class LosingActor(FakeActor):
    """Loses its rank in some updates and some saves, once each; its model is its version."""

    lost_in_updates: set[int] = field(default_factory=set)  # by the version before
    lost_in_saves: set[int] = field(default_factory=set)
    lost_in_loads: int = 0
    num_starts: int = 0

    def start(self, method: Any, shares: Any) -> Any:
        self.lose(self.lost_in_updates)
        return super().start(method, shares)

    def call(self, method: Any, *args: Any, **options: Any) -> Any:
        if method is TrainedWorker.save_states:
            self.lose(self.lost_in_saves)
            Path(args[0], "actor").write_text(str(self.world.policy_version))
        elif method is TrainedWorker.load_states:
            if self.lost_in_loads:
                self.lost_in_loads -= 1
                raise lost("actor")
            self.world.policy_version = int(Path(args[0], "actor").read_text())
        else:
            return super().call(method, *args, **options)

    def lose(self, versions: set[int]) -> None:
        if (version := self.world.policy_version) in versions:
            versions.remove(version)
            raise lost("actor")

    def start_again(self, why: LostRankError | None = None) -> None:
        self.num_starts += 1
        self.world.policy_version = 0


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("save_steps", [1, 3, -1])
def test_every_step_is_made_once_though_ranks_are_lost(
    tmp_path: Path, save_steps: int, is_async: bool
) -> None:
    world = World()
    trainer = make_trainer(world, num_prompts=32, is_async=is_async)
    actor = LosingActor(world, lost_in_updates={1, 4, 6}, lost_in_saves={3})
    actor.lost_in_loads = int(save_steps > 0)
    trainer.groups["actor"] = actor
    trainer.state.groups = {"actor": actor}
    ckpt = {"save_steps": save_steps, "path": str(tmp_path), "best_metric_key": "none"}
    config = PPOConfig.model_validate({"ckpt": ckpt}).ckpt
    trainer.state.opened = RunCheckpoints(config, DataFacts("prompts", 32))
    trainer.fit()
    assert [step["step"] for step in steps_of(trainer)] == list(range(1, 9))
    ledger = trainer.sampler.ledger
    assert ledger.outcomes == {"trained": 32} and not ledger.pending
    assert world.policy_version == trainer.state.weight_version == 8
    assert sum(staleness_histogram(trainer).values()) in (0, 64)
    assert actor.num_starts == (3 if save_steps == -1 else 5)
    if save_steps == 1 and not is_async:  # only what a save lost is sampled anew
        assert len(world.submitted) == 32 + 4


def test_a_run_that_was_to_end_behind_a_step_that_is_made_again_goes_on(tmp_path: Path) -> None:
    world = World()
    trainer = make_trainer(world, num_prompts=32)
    actor = LosingActor(world, lost_in_saves={6})
    trainer.groups["actor"], trainer.state.groups = actor, {"actor": actor}
    ckpt = {"save_steps": 2, "path": str(tmp_path), "best_metric_key": "none"}
    config = PPOConfig.model_validate({"ckpt": ckpt}).ckpt
    trainer.state.opened = RunCheckpoints(config, DataFacts("prompts", 32))
    ended: list[int] = []

    class EndOnce(Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if step == 6 and not ended:
                ended.append(step)
                trainer.end()

    trainer.callbacks = [EndOnce()]
    trainer.fit()
    assert ended and trainer.state.global_step == 8


@pytest.mark.parametrize("role", ["ref", "critic"])
def test_a_frozen_model_whose_rank_is_lost_computes_the_batch_once_more(role: str) -> None:
    started = []

    class Group:
        num_shares = 1

        def start(self, method: Any, shares: Any) -> Any:
            [(share,)] = shares

            def wait() -> list[Any]:
                if len(started) < 2:
                    raise lost(role)
                return [share.seq_lengths.float()]

            return wait

        def start_again(self, why: LostRankError) -> None:
            started.append(why)

    experience = Experience.from_rollouts([rollout([1, 2], [3, 4, 5])])
    wait = start_forward(Group(), ReferenceModelActor.compute_logprobs, experience)  # type: ignore[arg-type]
    if role == "critic":  # its weights are those of a checkpoint then: the step begins anew
        with pytest.raises(LostRankError):
            wait()
        assert not started
    else:
        assert wait().tolist() == [5.0]
        assert len(started) == 2
