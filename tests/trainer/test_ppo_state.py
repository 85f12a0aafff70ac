"""What the controller knows of a run survives a checkpoint, as JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace

from openrlhf.config.ppo import KLConfig
from openrlhf.datasets.sampler import EpochSampler, PromptCursor
from openrlhf.rollout.scoring import FailurePolicy
from openrlhf.rollout.step_sampler import StepSampler
from openrlhf.trainer.ppo_checkpoints import RunState
from openrlhf.trainer.ppo_utils.evaluation import Evaluation

NUM_PROMPTS = 7


def make(*, target: float | None = 0.1, coef: float = 0.5) -> RunState:
    prompts = [SimpleNamespace(row_id=row) for row in range(NUM_PROMPTS)]
    cursor = PromptCursor(EpochSampler(NUM_PROMPTS, 3), num_episodes=2)
    sampler = StepSampler(prompts, cursor, batch_size=3, policy=FailurePolicy(3))  # type: ignore[arg-type]
    return RunState(sampler, KLConfig(init_coef=coef, target=target, horizon=100))


def test_a_run_goes_on_where_its_state_was_taken() -> None:
    state = make()
    keys = [(0, row) for row in state.sampler.cursor.draw(5)]
    state.sampler.ledger.draw(keys)
    state.sampler.ledger.settle(keys[:4], "trained")
    state.sampler.ledger.settle(keys[4:], "failed:reward")
    state.adapt_kl_coef(kl=1.0, num_samples=10)
    state.global_step, state.weight_version = 2, 3
    state.history = [{"entropy": 0.5, "reward": 0.1}]
    values = enumerate((0.5, 0.75, 0.25))
    state.evaluations = [Evaluation("p", step, value, 0.1) for step, value in values]
    state.unlogged.add("reward", 0.25)
    state.num_unlogged = 1
    found = make()
    found.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert found.state_dict() == state.state_dict()
    assert (found.global_step, found.weight_version, found.num_unlogged) == (2, 3, 1)
    assert found.evaluations == [("p", step, v, 0.1) for step, v in enumerate((0.5, 0.75, 0.25))]
    assert found.unlogged["reward"] == 0.25
    assert found.kl_coef == state.kl_coef != 0.5
    assert found.sampler.ledger.outcomes == {"trained": 4, "failed:reward": 1}
    assert found.sampler.cursor.draw(5) == state.sampler.cursor.draw(5)


def test_a_constant_kl_coefficient_is_the_commands_an_adapted_one_the_checkpoints() -> None:
    saved = make(coef=0.5).state_dict()
    for target, expected in ((None, 0.2), (0.1, 0.5)):
        found = make(target=target, coef=0.2)
        found.load_state_dict(saved)
        assert found.kl_coef == expected
