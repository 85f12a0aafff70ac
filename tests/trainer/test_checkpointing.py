"""A run that is stopped and resumed is the run that was not: weights, samples, rates and log lines,
bit for bit.
"""

import json
import os
import resource
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.commands.rl_inputs import pass_rate
from openrlhf.commands.train_supervised import Checkpointer
from openrlhf.config.common import CheckpointConfig, DeepSpeedConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.sampler import PromptCursor
from openrlhf.distributed.checkpoints import DataFacts, RunCheckpoints, open_checkpoints
from openrlhf.distributed.collectives import shut_down
from openrlhf.distributed.folders import holding, verify
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.errors import CheckpointError, ConfigError, DataError
from openrlhf.rollout.scoring import FailurePolicy
from openrlhf.rollout.step_sampler import StepSampler
from openrlhf.trainer.device_phases import DevicePhases
from openrlhf.trainer.ppo_state import RunState
from openrlhf.trainer.workers.model_worker import TrainedWorker
from tests.distributed.spawn import run_ranks
from tests.trainer.small_run import (
    FACTS,
    NUM_STEPS,
    config_of,
    make_trainer,
    run,
)

ZERO2 = {"zero_stage": 2, "adam_offload": True}  # without it one rank would run stage 0
# Ranks -> options and the step at which the first start is stopped.
CASES = {
    2: {"zero2": (ZERO2, 2), "zero3": ({"zero_stage": 3}, 3)},
    1: {"zero0": ({"zero_stage": 0}, 2)},
}


def fail_to_save(options: dict, root: Path) -> dict:
    """The last rank cannot write more than a few bytes, three times."""
    opened = open_checkpoints(config_of(root, save_steps=1), FACTS)
    trainer = make_trainer(options, root / "run", None, 1)
    checkpointer = Checkpointer(trainer, opened)
    answers: list[object] = [bool(opened.save(checkpointer))]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    save_states = trainer.engine.save_states

    def save_to_full_disk(folder: Path) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            save_states(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    if trainer.strategy.topology.rank == trainer.strategy.topology.world_size - 1:
        trainer.engine.save_states = save_to_full_disk  # type: ignore[method-assign]
    trainer.global_step = 1
    for _ in range(3):
        try:
            answers.append(bool(opened.save(checkpointer)))
        except CheckpointError as error:
            answers.append(str(error))
    latest = opened.store.latest()
    names = sorted(path.name for path in root.iterdir() if path.name != "run")
    is_main = trainer.strategy.is_main
    return {
        "answers": answers,
        "latest": latest and latest.step,
        "names": names,
        "is_main": is_main,
    }


def refusal(options: dict, root: Path) -> str:
    """What the resume of another world's checkpoint says; empty where it works."""
    config = config_of(root / "ckpt", load_enable=True)
    opened = open_checkpoints(config, FACTS)
    trainer = make_trainer(options, root / "other-world", None, 1)
    try:
        Checkpointer(trainer, opened).resume()
    except CheckpointError as error:
        return str(error)
    return ""


def run_two_ranks(folder: Path) -> dict:
    results = run_cases(folder, 2)
    results["full disk"] = fail_to_save(ZERO2, folder / "full")
    root, options = folder / "zero3", {"zero_stage": 3}
    config = config_of(root / "stopped" / "ckpt", load_enable=True, save_steps=1)
    results["finished"] = run(options, root / "stopped", config)
    return results


def run_one_rank(folder: Path) -> dict:
    results = run_cases(folder, 1)
    results["refusals"] = [
        refusal(options, folder / case / "stopped") for case, (options, _) in CASES[2].items()
    ]
    return results


def run_cases(folder: Path, size: int) -> dict:
    results: dict = {}
    for case, (options, stop) in CASES[size].items():
        root = folder / case
        results[case, "straight"] = run(options, root / "straight", config_of(root / "none"))
        # The start that is stopped; the next begins with another model and other random numbers.
        root = root / "stopped"
        config = config_of(root / "ckpt", save_steps=stop, load_enable=True, save_hf=True)
        starts = ({"stop": stop}, {"seed": 99})
        results[case, "stopped"] = [run(options, root, config, **start) for start in starts]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def worlds(folder: Path) -> dict[int, list[dict]]:
    """Two ranks first: one rank then tries to go on from their checkpoints."""
    return {2: run_ranks(run_two_ranks, 2, folder), 1: run_ranks(run_one_rank, 1, folder)}  # type: ignore[dict-item]


def metrics_of(folder: Path) -> list[dict]:
    """The log without what a clock decides."""
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    return [
        {
            k: v
            for k, v in r.items()
            if k not in ("time", "tokens_per_s", "memory/peak_gib") and "timing/" not in k
        }
        for r in records
    ]


@pytest.mark.parametrize(("size", "case"), [(1, "zero0"), (2, "zero2"), (2, "zero3")])
def test_a_resumed_run_is_bitwise_the_run_that_was_not_stopped(
    worlds: dict, folder: Path, size: int, case: str
) -> None:
    _, stop = CASES[size][case]
    for results in worlds[size]:
        straight, (first, second) = results[case, "straight"], results[case, "stopped"]
        assert (first["resume_step"], second["resume_step"]) == (None, stop)
        assert first["seen"] + second["seen"] == straight["seen"]
        assert first["lrs"] + second["lrs"] == straight["lrs"]
        assert all(map(torch.equal, second["weights"], straight["weights"]))
        assert not any(map(torch.equal, first["weights"], second["weights"]))
        assert second["random"] == straight["random"]
        assert second["num_updates"] == NUM_STEPS
        seen = [row for rows in straight["seen"] for row in rows]
        assert sorted(seen[:21]) == sorted(seen[21:]) == list(range(21))
    assert metrics_of(folder / case / "stopped") == metrics_of(folder / case / "straight")


def test_checkpoints_are_of_every_interval_and_the_end(worlds: dict, folder: Path) -> None:
    assert worlds[1][0]["zero0", "stopped"][1]["steps"] == [2, 4, 6]
    verify(folder / "zero2" / "stopped" / "ckpt" / "global_step4_hf")
    state = json.loads((folder / "zero2/stopped/ckpt/global_step4/state.json").read_text())
    assert state["run"]["place"] == "step 4, epoch 2, 8 samples into it"
    assert state["data"] == asdict(FACTS)


def test_two_ranks_agree_on_what_is_finished_and_what_failed(worlds: dict) -> None:
    for results in worlds[2]:
        again = results["finished"]
        assert (again["resume_step"], again["seen"], again["steps"]) == (6, [], [3, 6])
        assert all(map(torch.equal, again["weights"], results["zero3", "straight"]["weights"]))
        # A save that fails on one rank fails on all, and three in a row stop the run.
        done, first, second, third = results["full disk"]["answers"]
        assert (done, first, second) == (True, False, False)
        assert "failure 3 in a row" in third and "step 1" in third
        assert results["full disk"]["latest"] == 0
        assert results["full disk"]["names"] == ["global_step0"]


def test_shards_of_another_number_of_ranks_are_refused_in_words(worlds: dict) -> None:
    for text in worlds[1][0]["refusals"]:
        assert "was written by 2 ranks" in text and "or start 2 ranks" in text


def saved_state(root: Path) -> CheckpointConfig:
    """A checkpoint root that holds step 4 of a run over FACTS."""
    config = config_of(root, load_enable=True, save_steps=2)
    opened = open_checkpoints(config, FACTS)
    opened.store.stage(4)
    opened.store.commit(4, {"run": {}, "data": asdict(FACTS)})
    return config


def test_other_data_are_refused(tmp_path: Path) -> None:
    config = saved_state(tmp_path)
    with pytest.raises(DataError, match="21 samples then, 21 now"):
        open_checkpoints(config, replace(FACTS, fingerprint="edited"))
    assert open_checkpoints(config, FACTS).resume_step == 4


def test_a_run_does_not_go_on_from_the_checkpoint_of_another(tmp_path: Path) -> None:
    root, first, second = tmp_path / "ckpt", tmp_path / "first", tmp_path / "second"
    config = config_of(root, load_enable=True, save_steps=2, output_dir=str(first))
    store = open_checkpoints(config, FACTS).store
    first.mkdir()
    store.stage(4)
    state = {"run": {}, "data": asdict(FACTS), "run_dir": str(first), "root": str(store.root)}
    store.commit(4, state)
    assert open_checkpoints(config, FACTS).resume_step == 4
    other = config.model_copy(update={"output_dir": str(second)})
    with pytest.raises(
        ConfigError, match=rf"is of the run in {first}, not of --save_path {second}"
    ):
        open_checkpoints(other, FACTS)
    shutil.copytree(root, tmp_path / "copy")
    copied = other.model_copy(update={"path": str(tmp_path / "copy")})
    assert open_checkpoints(copied, FACTS).resume_step == 4
    first.rename(second)  # a run folder that was moved
    assert open_checkpoints(other, FACTS).resume_step == 4


def test_a_new_run_does_not_mix_with_the_checkpoints_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = saved_state(tmp_path)
    opened = open_checkpoints(config.model_copy(update={"load_enable": False}), FACTS)
    assert opened.resume_step is None
    assert opened.find(4) is None
    assert "were moved to" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "aside-1" / "global_step4").is_dir()
    assert open_checkpoints(config, FACTS).resume_step is None
    assert "starting new" in capsys.readouterr().out


def die_while_saving(folder: Path) -> None:
    """Train two ranks; the second is killed in the middle of its shard of step 4."""
    root, options = folder / "killed", ZERO2
    strategy = DeepSpeedStrategy(DeepSpeedConfig())
    strategy.setup()
    save = torch.save

    def torn_save(state: object, path: Path) -> None:
        save(state, path)
        if "global_step4" in str(path) and strategy.topology.rank == 1:
            os.truncate(path, 100)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = torn_save
    run(options, root, config_of(root / "ckpt", save_steps=2))


def resume_after_death(folder: Path) -> dict:
    strategy = DeepSpeedStrategy(DeepSpeedConfig())
    strategy.setup()
    root, options = folder / "killed", ZERO2
    config = config_of(root / "ckpt", save_steps=2, load_enable=True)
    results = {
        "resumed": run(options, root, config, seed=99),
        "straight": run(options, folder / "straight", config_of(folder / "none")),
    }
    shut_down()
    return results


@pytest.mark.faults
def test_a_rank_killed_while_it_saves_costs_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(torch.multiprocessing.ProcessExitedException):
        run_ranks(die_while_saving, 2, tmp_path)
    assert (tmp_path / "killed" / "ckpt" / "tmp-global_step4").is_dir()
    for results in run_ranks(resume_after_death, 2, tmp_path):
        assert results["resumed"]["resume_step"] == 2
        assert results["resumed"]["steps"] == [2, 4, 6]
        weights = results["resumed"]["weights"], results["straight"]["weights"]
        assert all(map(torch.equal, *weights))
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "straight")


def config(**ckpt: object) -> PPOConfig:
    return PPOConfig.model_validate({"ckpt": ckpt, "eval": {"dataset": "d"}})


EVAL_PROMPTS = [SimpleNamespace(datasource=name) for name in ("math", "code", "math")]


@pytest.mark.parametrize(
    ("ckpt", "expected"),
    [
        ({}, ("eval/eval_math_pass1", False)),  # no checkpoints: no best model
        ({"save_steps": 5}, ("eval/eval_math_pass1", True)),
        ({"save_steps": 5, "best_metric_key": "none"}, ("eval/eval_math_pass1", False)),
        ({"best_metric_key": "eval_code_pass4"}, ("eval/eval_code_pass4", True)),
        ({"best_metric_key": "eval/eval_code_pass1"}, ("eval/eval_code_pass1", True)),
    ],
)
def test_the_best_model_is_chosen_by(ckpt: dict, expected: tuple[str, bool]) -> None:
    found = pass_rate(config(**ckpt), EVAL_PROMPTS)  # type: ignore[arg-type]
    assert (found, config(**ckpt).ckpt.keeps_best) == expected
    assert pass_rate(config(**ckpt), None) is None


def test_an_unknown_metric_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"pass9 is no pass rate .* eval/eval_code_pass1, or no"):
        pass_rate(config(best_metric_key="pass9"), EVAL_PROMPTS)  # type: ignore[arg-type]


class Ranks:
    """A group of three ranks, some of which see files below another root."""

    def __init__(self, *blind: int) -> None:
        self.roots = ["/nowhere/" if rank in blind else "" for rank in range(3)]

    def call(self, method, path: str) -> list:
        workers = (TrainedWorker(PPOConfig(), "critic", "run", rank) for rank in range(3))
        return [method(one, root + path) for one, root in zip(workers, self.roots, strict=True)]


def opened(root: Path, **ckpt: Any) -> RunCheckpoints:
    return RunCheckpoints(CheckpointConfig(path=str(root), **ckpt), DataFacts("x", 1))


def state_of(config: PPOConfig, root: Path, **groups: Any) -> RunState:
    phases = DevicePhases([], engines_sleep=False, training_sleeps=False)
    return RunState(config, opened(root, save_steps=config.ckpt.save_steps), groups, phases)


def test_ranks_that_do_not_see_the_folder_are_named_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    root = tmp_path / "ckpt"
    with holding(root, "--ckpt_path"):
        with pytest.raises(ConfigError, match=r"not seen by critic rank 1 on node .* nodes share"):
            state_of(config(save_steps=5), root, critic=Ranks(1)).check_is_shared()
        state_of(config(save_steps=5), root, critic=Ranks()).check_is_shared()
    state_of(config(), tmp_path / "none", critic=Ranks(0, 1, 2)).check_is_shared()
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


def make(*, target: float | None = 0.1, coef: float = 0.5) -> RunState:
    prompts = [SimpleNamespace(row_id=row) for row in range(7)]
    cursor = PromptCursor(7, 3, num_episodes=2)
    sampler = StepSampler(prompts, cursor, batch_size=3, policy=FailurePolicy(3))  # type: ignore[arg-type]
    kl = {"init_coef": coef, "target": target, "horizon": 100}
    state = state_of(PPOConfig.model_validate({"algo": {"kl": kl}}), Path("unused"))
    state.sampler = sampler
    return state


def test_a_constant_kl_coefficient_is_the_commands_an_adapted_one_the_checkpoints() -> None:
    saved = make(coef=0.5).state_dict()
    for target, expected in ((None, 0.2), (0.1, 0.5)):
        found = make(target=target, coef=0.2)
        found.load_state_dict(saved)
        assert found.kl_coef == expected
