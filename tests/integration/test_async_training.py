"""--async_train on real Ray, vLLM and DeepSpeed: bounded, balanced, and it learns."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from openrlhf.cli import train_ppo, train_ppo_ray
from openrlhf.errors import NumericsError
from openrlhf.trainer.ppo_trainer_async import PPOTrainerAsync
from openrlhf.utils.tracking import read_metrics
from tests.integration.commands import argv
from tests.integration.test_learning import (  # noqa: F401 - values is a fixture
    AGENT_FUNC,
    MIN_GAIN,
    NUM_STEPS,
    REWARD_FUNC,
    gain,
    train,
    values,
)
from tests.tiny import write_jsonl

SIZES = (
    "--async_train --n_samples_per_prompt 2 --rollout_batch_size 4 --train_batch_size 8 "
    "--micro_train_batch_size 8 --actor_learning_rate 1e-3 --vllm_num_engines 1 --enforce_eager "
    "--label_key answer "
)
FLAGS = SIZES + "--advantage_estimator reinforce_baseline --init_kl_coef 0 "


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[PPOTrainerAsync]:
    """Every asynchronous trainer that a command has run."""
    seen: list[PPOTrainerAsync] = []
    fit = PPOTrainerAsync.fit

    def fit_and_tell(trainer: PPOTrainerAsync) -> None:
        seen.append(trainer)
        fit(trainer)

    monkeypatch.setattr(PPOTrainerAsync, "fit", fit_and_tell)
    return seen


def run(flags: str, **given: Path | str) -> list[dict[str, float]]:
    """Run the command; the records of its steps."""
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    train_ppo_ray.main([*argv(""), *flags.split(), *words])
    path = Path(given["save_path"]) / "metrics.jsonl"
    return [record for record in read_metrics(path) if "reward" in record]


def histogram(steps: list[dict[str, float]]) -> dict[int, int]:
    """Samples by staleness."""
    found: dict[int, int] = {}
    for step in steps:
        for name, value in step.items():
            if name.startswith("num_samples/stale_"):
                staleness = int(name.rpartition("_")[2])
                found[staleness] = found.get(staleness, 0) + int(value)
    return found


def trained_rows(run_dir: Path) -> list[int]:
    """The row of every sample that was trained on."""
    files = sorted((run_dir / "rollouts").iterdir())
    return [row for path in files for row in pq.read_table(path)["row_id"].to_pylist()]


def check(steps: list[dict[str, float]], trainer: PPOTrainerAsync, *, limit: int) -> None:
    """Staleness is within its limit, every prompt was trained on once, and what is fresh agrees
    with the trainer to rounding.
    """
    ledger = trainer.sampler.ledger
    num_prompts = ledger.num_drawn
    assert ledger.outcomes == {"trained": num_prompts} and not ledger.pending
    assert len(steps) == trainer.num_steps == math.ceil(num_prompts / trainer.limits.batch_size)
    assert trainer.state.weight_version == len(steps)
    found = histogram(steps)
    assert sum(found.values()) == 2 * num_prompts
    assert max(found) == limit
    assert steps[0]["staleness_max"] == 0 and steps[0].get("vllm_kl", 0.0) < 1e-6
    # A step whose rewards are all equal trains on nothing and compares nothing.
    compared = [step for step in steps if "vllm_kl" in step]
    assert compared
    for step in compared:
        by_age = {name: v for name, v in step.items() if name.startswith("vllm_kl/")}
        oldest = int(step["staleness_max"])  # token by token: some of a sample are younger
        assert by_age.keys() <= {f"vllm_kl/stale_{age}" for age in range(oldest + 1)}
        assert by_age and all(math.isfinite(value) for value in by_age.values())
        assert by_age.get("vllm_kl/stale_0", 0.0) < 1e-6


def test_an_asynchronous_run_is_bounded_and_balanced(
    ray_cluster: None,
    tiny_model_dir: Path,
    reward_file: Path,
    prompt_file: Path,
    tmp_path: Path,
    trainers: list[PPOTrainerAsync],
) -> None:
    steps = run(
        FLAGS + "--num_episodes 2 --eval_temperature 0 --eval_n_samples_per_prompt 1 "
        "--eval_steps 2 --async_queue_size 2",
        pretrain=tiny_model_dir,
        prompt_data=prompt_file,
        eval_dataset=prompt_file,
        remote_rm_url=reward_file,
        save_path=tmp_path / "run",
    )
    check(steps, trainers[0], limit=2)
    assert all(step["mixed_version_ratio"] == 0 for step in steps)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sum("eval/eval_odd_pass1" in record for record in records) == 4
    assert sorted(trained_rows(tmp_path / "run")) == sorted([*range(11)] * 4)


@pytest.mark.slow
def test_weights_change_under_running_samples(
    ray_cluster: None,
    tiny_model_dir: Path,
    reward_file: Path,
    tmp_path: Path,
    trainers: list[PPOTrainerAsync],
) -> None:
    rows = [{"input": f"{k}+{k}=", "answer": str(2 * k)} for k in range(48)]
    steps = run(
        FLAGS + "--partial_rollout --vllm_generate_batch_size 8 --generate_max_len 200 "
        "--enable_vllm_is_correction --enable_prefix_caching",
        pretrain=tiny_model_dir,
        prompt_data=write_jsonl(tmp_path / "prompts.jsonl", rows),
        remote_rm_url=reward_file,
        save_path=tmp_path / "run",
    )
    check(steps, trainers[0], limit=1)
    assert sum(step["mixed_version_ratio"] > 0 for step in steps) >= 2
    assert all(math.isfinite(step["is_weight"]) for step in steps if "is_weight" in step)


@pytest.mark.slow
def test_a_run_that_was_ended_goes_on_with_what_was_pending(
    ray_cluster: None,
    tiny_model_dir: Path,
    reward_file: Path,
    prompt_file: Path,
    tmp_path: Path,
    trainers: list[PPOTrainerAsync],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settle = PPOTrainerAsync.settle

    def settle_or_end(trainer: PPOTrainerAsync) -> None:
        settle(trainer)
        if trainer.state.global_step == 4:
            raise NumericsError("ended by the test")

    flags = FLAGS + "--num_episodes 3 --save_steps 3 --partial_rollout --async_queue_size 2"
    given = {
        "pretrain": tiny_model_dir,
        "prompt_data": prompt_file,
        "remote_rm_url": reward_file,
        "save_path": tmp_path / "run",
        "ckpt_path": tmp_path / "ckpt",
    }
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(PPOTrainerAsync, "settle", settle_or_end)
        run(flags, **given)
    steps = run(f"{flags} --load_checkpoint", **given)
    ledger = trainers[-1].sampler.ledger
    assert ledger.num_drawn == 33 and ledger.outcomes == {"trained": 33}
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    # What was finished goes on with the checkpoint, and is as old as it would have been.
    assert "finished prompts of the checkpoint wait for their step" in capsys.readouterr().out
    assert steps[3]["staleness_max"] > 0
    assert steps[3].get("vllm_kl/stale_0", 0.0) < 1e-6
    assert max(histogram(steps)) <= 2
    assert sorted(trained_rows(tmp_path / "run")) == sorted([*range(11)] * 6)


@pytest.mark.slow
def test_samples_without_a_signal_are_replaced(
    ray_cluster: None,
    tiny_model_dir: Path,
    prompt_file: Path,
    tmp_path: Path,
    trainers: list[PPOTrainerAsync],
) -> None:
    steps = run(
        FLAGS + "--dynamic_filtering --dynamic_filtering_reward_range -1 2 --num_episodes 3",
        pretrain=tiny_model_dir,
        prompt_data=prompt_file,
        remote_rm_url=write_parity(tmp_path),
        save_path=tmp_path / "run",
    )
    ledger = trainers[0].sampler.ledger
    assert ledger.num_drawn == 33 == sum(ledger.outcomes.values())
    assert ledger.outcomes["filtered:no signal"] > 0 and ledger.outcomes["trained"] > 0
    assert max(histogram(steps)) <= 1
    assert sum(histogram(steps).values()) == 2 * ledger.outcomes["trained"]


def write_parity(folder: Path) -> Path:
    """A reward of 1 for an even first letter: about half of the pairs differ."""
    path = folder / "parity.py"
    path.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    parts = [query[len(prompt):] or 'a' for query, prompt in zip(queries, prompts)]\n"
        "    return {'rewards': [float(ord(part[0]) % 2) for part in parts]}\n"
    )
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", ["", "--partial_rollout --async_queue_size 2"])
def test_an_asynchronous_run_learns(
    ray_cluster: None,
    values: dict,  # noqa: F811
    tmp_path: Path,
    trainers: list[PPOTrainerAsync],
    flags: str,
) -> None:
    (tmp_path / "reward_func.py").write_text(REWARD_FUNC)
    steps = train(
        "--async_train --enable_vllm_is_correction --vllm_num_engines 1 --enforce_eager "
        f"--advantage_estimator reinforce_baseline --init_kl_coef 0 {flags}",
        remote_rm_url=tmp_path / "reward_func.py",
        label_key="answer",
        **values,
    )
    assert len(steps) == NUM_STEPS
    assert steps[0]["reward"] < 0.2
    assert gain(steps) > MIN_GAIN
    assert 0 < max(histogram(steps)) <= trainers[0].limits.max_staleness


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_asynchronous_agent_of_the_documents_learns(
    ray_cluster: None,
    values: dict,  # noqa: F811
    tmp_path: Path,
    trainers: list[PPOTrainerAsync],
) -> None:
    (tmp_path / "agent_func.py").write_text(AGENT_FUNC)
    steps = train(
        "--async_train --vllm_num_engines 1 --enforce_eager --max_len 128 "
        "--advantage_estimator reinforce_baseline --init_kl_coef 0",
        agent_func_path=tmp_path / "agent_func.py",
        label_key="answer",
        **values,
    )
    assert len(steps) == NUM_STEPS
    assert gain(steps) > MIN_GAIN
    assert 0 < max(histogram(steps)) <= 1
    assert trainers[0].sampler.ledger.outcomes == {"trained": 16 * NUM_STEPS}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_agent", [False, True], ids=["reward_model", "agent"])
def test_ppo_with_its_critic_and_reference_runs_asynchronously(
    ray_cluster: None,
    tiny_model_dir: Path,
    reward_model_dir: Path,
    prompt_file: Path,
    tmp_path: Path,
    trainers: list[PPOTrainerAsync],
    is_agent: bool,
) -> None:
    (tmp_path / "agent_func.py").write_text(AGENT_FUNC)
    source = (
        {"agent_func_path": tmp_path / "agent_func.py"}
        if is_agent
        else {"reward_pretrain": reward_model_dir}
    )
    steps = run(
        SIZES + "--advantage_estimator gae --init_kl_coef 0.01 --critic_learning_rate 1e-3 "
        "--num_episodes 3 --max_len 128",
        pretrain=tiny_model_dir,
        critic_pretrain=reward_model_dir,
        prompt_data=prompt_file,
        save_path=tmp_path / "run",
        **source,
    )
    check(steps, trainers[0], limit=1)
    for step in steps:
        assert math.isfinite(step["critic_loss"]) and step["critic_grad_norm"] > 0
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-4)
    assert abs(steps[-1]["kl"]) > 1e-4  # the policy has left its reference


@pytest.mark.slow
def test_agents_act_while_weights_change_and_are_evaluated(
    ray_cluster: None,
    tiny_model_dir: Path,
    prompt_file: Path,
    tmp_path: Path,
    trainers: list[PPOTrainerAsync],
) -> None:
    (tmp_path / "agent_func.py").write_text(AGENT_FUNC)
    steps = run(
        FLAGS + "--partial_rollout --async_queue_size 2 --num_episodes 2 --max_len 128 "
        "--eval_temperature 0 --eval_n_samples_per_prompt 1 --eval_steps 3",
        pretrain=tiny_model_dir,
        prompt_data=prompt_file,
        eval_dataset=prompt_file,
        agent_func_path=tmp_path / "agent_func.py",
        save_path=tmp_path / "run",
    )
    assert trainers[0].sampler.ledger.outcomes == {"trained": 22}
    assert len(steps) == 6 and 0 < max(histogram(steps)) <= 2
    assert sorted(set(trained_rows(tmp_path / "run"))) == list(range(11))
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sum("eval/eval_odd_pass1" in record for record in records) == 3


def test_one_process_says_that_it_cannot(
    tiny_model_dir: Path,
    reward_file: Path,
    prompt_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = argv(
        "--async_train --train_batch_size 8",
        pretrain=tiny_model_dir,
        prompt_data=prompt_file,
        remote_rm_url=reward_file,
        save_path=tmp_path / "run",
    )
    with pytest.raises(SystemExit) as stopped:
        train_ppo.main(words)
    assert stopped.value.code == 2
    assert "error: --async_train needs processes of their own" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
