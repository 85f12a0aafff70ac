"""Where RL checkpoints may stand, which metric the best model is chosen by, and what of a run
survives as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.config.common import CheckpointConfig
from openrlhf.config.ppo import KLConfig, PPOConfig
from openrlhf.datasets.sampler import EpochSampler, PromptCursor
from openrlhf.distributed.checkpoints import DataFacts, RunCheckpoints
from openrlhf.distributed.folders import holding
from openrlhf.errors import ConfigError
from openrlhf.rollout.scoring import FailurePolicy
from openrlhf.rollout.step_sampler import StepSampler
from openrlhf.trainer.ppo_checkpoints import PPOCheckpoints, RunState
from openrlhf.trainer.ppo_setup import best_metric
from openrlhf.trainer.ppo_utils.evaluation import Evaluation
from openrlhf.trainer.ray.model_actor import TrainedWorker
from openrlhf.trainer.ray.phases import DevicePhases


def config(**ckpt: object) -> PPOConfig:
    return PPOConfig.model_validate({"ckpt": ckpt, "eval": {"dataset": "d"}})


EVAL_PROMPTS = [SimpleNamespace(datasource=name) for name in ("math", "code", "math")]


@pytest.mark.parametrize(
    ("ckpt", "expected"),
    [
        ({}, None),  # no checkpoints: no best one
        ({"save_steps": 5}, "eval/eval_math_pass1"),
        ({"save_steps": 5, "best_metric_key": "none"}, None),
        ({"best_metric_key": "eval_code_pass4"}, "eval/eval_code_pass4"),
        ({"best_metric_key": "eval/eval_code_pass1"}, "eval/eval_code_pass1"),
    ],
)
def test_the_best_model_is_chosen_by(ckpt: dict, expected: str | None) -> None:
    assert best_metric(config(**ckpt), EVAL_PROMPTS) == expected  # type: ignore[arg-type]
    assert best_metric(config(**ckpt), None) is None


def test_an_unknown_metric_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"pass9 is no pass rate .* eval/eval_code_pass1, or no"):
        best_metric(config(best_metric_key="pass9"), EVAL_PROMPTS)  # type: ignore[arg-type]


class Ranks:
    """A group of ranks, some of which see files below another root."""

    def __init__(self, blind: set[int]) -> None:
        self.num_shares = 3
        self.blind = blind

    def call(self, method, path: str) -> list:
        workers = [
            TrainedWorker(PPOConfig(), "critic", "run", rank, num_ranks=3) for rank in range(3)
        ]
        elsewhere = "/nowhere/"
        return [
            method(worker, elsewhere + path if rank in self.blind else path)
            for rank, worker in enumerate(workers)
        ]


def opened(root: Path, **ckpt: Any) -> RunCheckpoints:
    return RunCheckpoints(CheckpointConfig(path=str(root), **ckpt), DataFacts("x", 1))


def checkpoints(blind: set[int], root: Path, **ckpt: int) -> PPOCheckpoints:
    groups: Any = {"critic": Ranks(blind)}
    phases = DevicePhases([], engines_sleep=False, training_sleeps=False)
    return PPOCheckpoints(opened(root, **ckpt), groups, phases, best_metric=None)


def test_ranks_that_do_not_see_the_folder_are_named_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    root = tmp_path / "ckpt"
    with holding(root, "--ckpt_path"):
        with pytest.raises(ConfigError, match=r"not seen by critic rank 1 on node .* nodes share"):
            checkpoints({1}, root, save_steps=5).check_is_shared()
        checkpoints(set(), root, save_steps=5).check_is_shared()
    checkpoints({0, 1, 2}, tmp_path / "none").check_is_shared()
    assert not (tmp_path / "none").exists()


def test_one_best_model_stands_and_a_failed_one_costs_nothing(tmp_path: Path, capsys) -> None:
    saver = opened(tmp_path)
    store = saver.store

    def export(path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text("{}")

    def fail(path: Path) -> None:
        export(path)
        raise OSError("disk full")

    assert saver.save_best(3, export)
    assert saver.save_best(5, export)
    assert not saver.save_best(7, fail)
    assert "step 7) was not saved: disk full" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["best_global_step5_hf"]
    aside = store.set_best_aside()
    assert aside is not None and store.find(5) is None
    assert (aside / "best_global_step5_hf" / "config.json").is_file()


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
