"""Where RL checkpoints may stand, and which metric the best model is chosen by."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf.config.common import CheckpointConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.checkpoints import DataFacts, RunCheckpoints
from openrlhf.distributed.folders import holding
from openrlhf.errors import ConfigError
from openrlhf.trainer.ppo_checkpoints import check_is_shared
from openrlhf.trainer.ppo_setup import best_metric
from openrlhf.trainer.ray.model_actor import TrainedWorker


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


def opened(root: Path, **saved: object) -> RunCheckpoints:
    found = SimpleNamespace(**saved) if saved else None
    ckpt = CheckpointConfig(path=str(root))
    return RunCheckpoints(ckpt, DataFacts("x", 1, 1), found)  # type: ignore[arg-type]


def test_ranks_that_do_not_see_the_folder_are_named_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    root = tmp_path / "ckpt"
    with holding(root, "--ckpt_path"):
        with pytest.raises(ConfigError, match=r"not seen by critic rank 1 on node .* nodes share"):
            check_is_shared(config(save_steps=5), opened(root), {"critic": Ranks({1})})
        check_is_shared(config(save_steps=5), opened(root), {"critic": Ranks(set())})
    check_is_shared(config(), opened(tmp_path / "none"), {"critic": Ranks({0, 1, 2})})
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
