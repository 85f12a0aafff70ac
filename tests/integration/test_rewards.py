"""Every source of rewards in whole runs, and what a reward that cannot be had does to them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from openrlhf.cli import train_ppo, train_ppo_ray
from openrlhf.datasets.sampler import EpochSampler
from openrlhf.rewards.base import RewardBatch, RewardResult
from openrlhf.rewards.workers import Worker
from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.utils.tracking import read_metrics
from tests.integration.commands import argv
from tests.rewards.servers import RewardServer, free_url, lengths
from tests.tiny import make_reward_model

FLAGS = "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "

# What is done for the prompt 3+3= is put in by the test.
UNRULY = """
import os, time

def reward_func(queries, prompts, labels):
    if "6" in labels:
        {what}
    return {{"rewards": [float(len(query)) for query in queries]}}
"""


@pytest.fixture
def values(tiny_model_dir: Path, prompt_file: Path, tmp_path: Path) -> dict[str, Path | str]:
    """Values that all commands share; eleven prompts are two steps."""
    return {
        "pretrain": tiny_model_dir,
        "prompt_data": prompt_file,
        "label_key": "answer",
        "save_path": tmp_path / "run",
    }


def unruly_file(tmp_path: Path, what: str) -> Path:
    path = tmp_path / "unruly.py"
    path.write_text(UNRULY.format(what=what))
    return path


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    return [r for r in read_metrics(path) if "reward" in r] if path.exists() else []


def error_of(
    capsys: pytest.CaptureFixture[str], flags: str, **values: Path | str
) -> tuple[int, str]:
    """Exit code and error line of a run that fails."""
    with pytest.raises(SystemExit) as stop:
        train_ppo.main(argv(flags, **values))
    [line] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    return int(stop.value.code or 0), line


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("time.sleep(1e6)", "did not end in 2 s (--reward_timeout_s)"),
        ("os._exit(1)", "ended its process (exit code 1)"),
        ("return [float('nan')] * len(labels)", "is nan, not a finite float32"),
        ("raise ValueError('six')", "unruly.py:6: ValueError: six"),
    ],
)
def test_a_reward_that_cannot_be_had_ends_the_run_before_it_trains(
    values: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, message: str
) -> None:
    code = unruly_file(tmp_path, what)
    flags = FLAGS + "--reward_timeout_s 2 --reward_num_workers 2 --max_samples 4"
    exit_code, error = error_of(capsys, flags, remote_rm_url=code, rollout_batch_size="4", **values)
    assert exit_code == 3 and message in error
    assert steps_of(tmp_path / "run") == []


def test_a_prompt_without_reward_is_dropped_and_the_rest_is_trained_on(
    values: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: set[int] = set()
    score = Worker.score

    async def noted(self: Worker, batch: RewardBatch) -> RewardResult:
        result = await score(self, batch)
        assert self.process is not None
        pids.add(self.process.pid)
        return result

    monkeypatch.setattr(Worker, "score", noted)
    trainers: list[PPOTrainer] = []
    fit = PPOTrainer.fit
    monkeypatch.setattr(PPOTrainer, "fit", lambda self: (trainers.append(self), fit(self)))
    code = unruly_file(tmp_path, "os._exit(1)")
    flags = (
        f"{FLAGS}--reward_failure drop_group --reward_max_dropped 0.5 --num_episodes 2 "
        "--reward_num_workers 2"
    )
    train_ppo.main(argv(flags, remote_rm_url=code, **values))
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 4
    assert sum(step["num_dropped_groups"] for step in steps) == 2  # one an episode
    assert trainers[0].sampler.ledger.outcomes == {"trained": 20, "failed:reward": 2}
    assert len(pids) >= 3  # those that died were replaced
    assert not any(map(psutil.pid_exists, pids))  # none is left behind


def test_more_dropped_prompts_than_allowed_end_the_run(
    values: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = unruly_file(tmp_path, "os._exit(1)")
    flags = FLAGS + "--reward_failure drop_group --reward_max_dropped 0.05"
    exit_code, error = error_of(capsys, flags, remote_rm_url=code, **values)
    assert exit_code == 3
    assert "1 prompt(s) got no rewards, more than --reward_max_dropped 0.05 of the 8 of" in error


# The samples of a prompt differ in their rewards, but for one prompt.
REFILL = """
def reward_func(queries, prompts, labels):
    if "{bad}" in labels:
        raise ValueError("no reward")
    return [0.0 if label == "{flat}" else float(k) for k, label in enumerate(labels)]
"""


@pytest.mark.parametrize(
    ("flags", "outcomes"),
    [
        ("--vllm_generate_batch_size 2", {"trained": 10}),
        (
            "--dynamic_filtering --dynamic_filtering_reward_range -9 9",
            {"trained": 9, "filtered:no signal": 1},
        ),
    ],
    ids=["several calls", "refill"],
)
def test_a_prompt_that_fails_in_a_small_call_is_one_of_its_whole_step(
    values: dict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    outcomes: dict[str, int],
) -> None:
    first, ninth = (int(EpochSampler(11, 42).order(0)[k]) for k in (0, 8))
    code = tmp_path / "refill.py"
    code.write_text(REFILL.format(flat=2 * first, bad=2 * ninth))
    trainers: list[PPOTrainer] = []
    fit = PPOTrainer.fit
    monkeypatch.setattr(PPOTrainer, "fit", lambda self: (trainers.append(self), fit(self)))
    words = f"{FLAGS}{flags} --reward_failure drop_group --reward_max_dropped 0.2"  # of 8: one
    train_ppo.main(argv(words, remote_rm_url=code, **values))
    assert trainers[0].sampler.ledger.outcomes == outcomes | {"failed:reward": 1}


def test_rewards_of_servers_train_the_policy(values: dict, tmp_path: Path) -> None:
    with ExitStack() as stack:
        good, other = (stack.enter_context(RewardServer()) for _ in range(2))
        urls = f"{good.url},{free_url()},{other.url}"
        train_ppo.main(argv(FLAGS, remote_rm_url=urls, **values))
    assert len(steps_of(tmp_path / "run")) == 2
    assert len(good.queries) + len(other.queries) == 22  # every sample once
    assert good.queries and other.queries
    assert max(len(body["query"]) for body in good.requests) == 4  # --micro_rollout_batch_size
    assert sorted(label for s in (good, other) for b in s.requests for label in b["labels"]) == (
        sorted(str(2 * i) for i in range(11) for _ in range(2))
    )


def test_a_server_that_refuses_ends_the_run_before_it_trains(
    values: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RewardServer(lambda server, body: (422, b"query[0] is too long")) as server:
        exit_code, error = error_of(capsys, FLAGS, remote_rm_url=server.url, **values)
    assert exit_code == 3
    assert "answered 422 for samples step1/" in error and "query[0] is too long" in error
    assert steps_of(tmp_path / "run") == []


def test_a_server_that_fails_at_first_is_asked_again(values: dict, tmp_path: Path) -> None:
    def refuses_once(server: RewardServer, body: dict) -> tuple[int, bytes]:
        return (422, b"") if len(server.requests) == 1 else lengths(server, body)

    flags = FLAGS + "--reward_failure retry(1) --max_samples 4"
    with RewardServer(refuses_once) as server:
        train_ppo.main(argv(flags, remote_rm_url=server.url, **values))
    [step] = steps_of(tmp_path / "run")
    assert step["num_reward_retries"] >= 1


def test_a_reward_model_that_cannot_read_a_whole_sample_is_refused(
    values: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = make_reward_model(tmp_path / "short", max_position_embeddings=71)
    exit_code, error = error_of(capsys, FLAGS, reward_pretrain=short, **values)
    assert exit_code == 2
    assert f"71 positions of the model {short}. Type --prompt_max_len 63" in error


def test_several_reward_models_add_up_and_are_logged_one_by_one(
    values: dict, reward_model_dir: Path, tmp_path: Path
) -> None:
    other = make_reward_model(tmp_path / "safe", seed=3)
    flags = FLAGS + f"--reward_pretrain {reward_model_dir},{other} --reward_weights 1,0.5"
    train_ppo.main(argv(flags, **values))
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    for step in steps:
        assert step["reward/reward"] != step["reward/safe"]
        total = step["reward/reward"] + 0.5 * step["reward/safe"]
        assert step["reward"] == pytest.approx(total, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("places", ["", "--colocate_all_models"], ids=["own groups", "one place"])
def test_several_reward_models_on_ray(
    values: dict, reward_model_dir: Path, tmp_path: Path, ray_cluster: None, places: str
) -> None:
    other = make_reward_model(tmp_path / "safe", seed=3)
    flags = f"{FLAGS} {places} --vllm_num_engines 1 --enforce_eager --reward_weights 1,0.5"
    train_ppo_ray.main(argv(flags, reward_pretrain=f"{reward_model_dir},{other}", **values))
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    for step in steps:
        total = step["reward/reward"] + 0.5 * step["reward/safe"]
        assert step["reward"] == pytest.approx(total, abs=1e-5)
