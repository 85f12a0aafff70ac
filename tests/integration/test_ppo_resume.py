"""An RL command that was killed goes on, typed again, bit for bit as if it had not been: weights,
optimizers, random numbers, ledger and log.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
import torch
from safetensors.torch import load_file

from openrlhf.report.run_folder import read_runs
from tests.helpers.stopped_runs import records, stopping_behind, sums_of_states
from tests.integration.commands import steps_of
from tests.integration.ppo_runs import (
    GRPO,
    NUM_PROMPTS,
    PPO,
    make_inputs,
    saved_run,
    start,
    words,
)

NUM_STEPS = 6  # two episodes of three
SAVING = "--num_episodes 2 --save_steps 2 --load_checkpoint"
CASES = {
    "ppo": f"{PPO} {SAVING} --init_kl_coef 0.05 --kl_target 0.01 --kl_horizon 100 --max_epochs 2 "
    "--freezing_actor_steps 1",
    "grpo": f"{GRPO} {SAVING} --max_ckpt_num 9 --save_hf_ckpt --enable_ema --init_kl_coef 0.01 "
    "--use_kl_loss --kl_estimator k3 --dynamic_filtering --entropy_loss_coef 0.001 "
    "--pretrain_data {root}/texts.jsonl --ptx_coef 0.1 "
    "--eval_dataset {root}/prompts.jsonl --eval_steps 1",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("ppo_resume"))


@pytest.fixture(scope="module", params=CASES)
def runs(root: Path, request: pytest.FixtureRequest) -> tuple[str, Path, Path]:
    """A case, the folder of a straight run, and that of one that was stopped and typed again."""
    case = request.param
    straight, resumed = root / case / "straight", root / case / "resumed"
    assert start(root, straight, CASES[case]) == 0
    with stopping_behind(2):
        start(root, resumed, CASES[case])
    assert not (resumed / "config.json").exists()
    assert start(root, resumed, CASES[case]) == 0
    return case, straight, resumed


def test_a_resumed_run_is_the_run_that_was_not_stopped(runs: tuple[str, Path, Path]) -> None:
    case, straight, resumed = runs
    assert records(straight) == records(resumed)
    assert len(steps_of(resumed)) >= 5
    last = steps_of(resumed)[-1]["step"]
    folders = [run / "ckpt" / f"global_step{last}" for run in (straight, resumed)]
    names = {path.name for path in folders[1].iterdir()}
    expected = {"actor", "critic", "critic_rank0.json"} if case == "ppo" else {"average.pt"}
    assert {"actor", "actor_rank0.json"} | expected <= names
    assert saved_run(folders[0]) == saved_run(folders[1])
    # One was written beside the next step, the other before the run stopped.
    assert len(sums := sums_of_states(straight, 2)) == 2
    assert sums == sums_of_states(resumed, 2)
    models = [load_file(run / "model.safetensors") for run in (straight, resumed)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    ledger = saved_run(folders[1])["sampler"]["ledger"]
    assert ledger["num_drawn"] == 2 * NUM_PROMPTS == sum(ledger["outcomes"].values())
    assert ledger["pending"] == []
    evaluated = [r["step"] for r in records(resumed) if "eval/truncated_rate" in r]
    assert evaluated == (list(range(last + 1)) if case == "grpo" else [])


def test_what_the_same_command_may_change(root: Path, tmp_path: Path, capsys) -> None:
    flags = f"{GRPO} --init_kl_coef 0 --num_episodes 1 --save_steps 2 --load_checkpoint"
    run_dir = tmp_path / "run"
    with stopping_behind(2):
        start(root, run_dir, flags)
    before = (run_dir / "config.yaml").read_text()
    assert start(root, run_dir, flags, "--seed", "7") == 2
    assert "Type --seed 42" in " ".join(capsys.readouterr().err.split())
    assert (run_dir / "config.yaml").read_text() == before
    assert start(root, run_dir, flags, "--temperature", "0.9") == 0
    assert "temperature: 0.9" in (run_dir / "config.yaml").read_text()
    # Finished: ends at once. More episodes: goes on.
    exported = (run_dir / "model.safetensors").stat().st_mtime_ns
    assert start(root, run_dir, flags, "--temperature", "0.9") == 0
    assert "nothing is left to do" in capsys.readouterr().out
    assert (run_dir / "model.safetensors").stat().st_mtime_ns == exported
    more = flags.replace("--num_episodes 1", "--num_episodes 2")
    # Half written, the newest one is passed over.
    (run_dir / "ckpt" / "global_step3" / "actor_rank0.json").unlink()
    rate = ["--reset_lr", "--actor_learning_rate", "1e-8"]
    assert start(root, run_dir, more, "--temperature", "0.9", *rate) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "global_step3 is damaged and passed over" in said
    steps = steps_of(run_dir)
    assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 1))
    assert min(record["actor_lr"] for record in steps[:2]) > 1e-4 > 1e-8 >= steps[-1]["actor_lr"]


# On Ray and vLLM: no step is lost or done twice, engines hold the policy of the checkpoint.
RAY_SAVING = (
    "--num_episodes 2 --save_steps 2 --load_checkpoint --vllm_num_engines 1 "
    "--eval_dataset {root}/prompts.jsonl --eval_temperature 0 --eval_n_samples_per_prompt 1"
)
RAY_CASES = {
    "ppo_with_a_critic_sharded": f"{PPO} {RAY_SAVING} --init_kl_coef 0.01 --zero_stage 3 "
    "--actor_num_gpus_per_node 2 --critic_num_gpus_per_node 2",
    "grpo_all_on_one_place": f"{GRPO} {RAY_SAVING} --init_kl_coef 0 --colocate_all_models "
    "--vllm_enable_sleep --deepspeed_enable_sleep --enable_ema",
}


def run_killed(command: list[str], *, stop_at: int | None = None, run_dir: Path) -> str:
    """What a command printed; with `stop_at` it is killed soon after that step."""
    environment = os.environ | {"RAY_ADDRESS": "local"}
    if stop_at is not None:
        environment["REWARD_DELAY"] = "0.2"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        deadline, num_before = time.monotonic() + 300, len(steps_of(run_dir))
        while stop_at is not None and process.poll() is None and time.monotonic() < deadline:
            records = steps_of(run_dir)
            if len(records) > num_before and records[-1]["step"] >= stop_at:
                time.sleep(random.random() / 2)
                process.send_signal(signal.SIGKILL)
            time.sleep(0.05)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == (0 if stop_at is None else -signal.SIGKILL), output[-3000:]
    return output


def test_a_run_that_ends_while_it_loads_or_exports_says_how_to_go_on(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, run = f"{GRPO} --max_samples 4 --save_steps 1 --init_kl_coef 0", tmp_path / "run"

    def last_words(interrupted: str) -> str:
        def interrupt(*args: object) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(f"openrlhf.commands.train_rl.{interrupted}", interrupt)
            assert start(root, run, flags) == 130
        return capsys.readouterr().err.splitlines()[-1]

    assert last_words("init_models") == (
        "error: interrupted: nothing was saved yet. Type the same command to start again"
    )
    assert last_words("export_final") == (
        f"error: interrupted: step 1 was saved in {run}/ckpt. To go on, type the same command "
        "with --load_checkpoint"
    )
    assert not (run / "config.json").exists()
    [found] = read_runs([run])  # as a report made later reads them
    assert found.facts()["state"].startswith("ended after step 1: Interrupted: step 1 was saved in")
    assert start(root, run, flags, "--load_checkpoint") == 0
    assert (run / "config.json").exists()
    [found] = read_runs([run])
    assert found.facts()["state"] == "finished, step 1"


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_run_that_was_killed_three_times_is_the_run_that_was_not(tmp_path: Path) -> None:
    root, straight, killed = make_inputs(tmp_path), tmp_path / "straight", tmp_path / "killed"
    flags = f"{GRPO} --num_episodes 2 --save_steps 1 --load_checkpoint --init_kl_coef 0.01"
    commands = [
        [sys.executable, "-m", "openrlhf.cli.train_ppo", *words(root, run, flags)]
        for run in (straight, killed)
    ]
    run_killed(commands[0], run_dir=straight)
    for step in (1, 2, 4):
        run_killed(commands[1], stop_at=step, run_dir=killed)
    run_killed(commands[1], run_dir=killed)
    assert len(steps_of(straight)) == NUM_STEPS and records(straight) == records(killed)
    assert sums_of_states(straight, NUM_STEPS) == sums_of_states(killed, NUM_STEPS) != {}
    models = [load_file(run / "model.safetensors") for run in (straight, killed)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", RAY_CASES)
def test_a_killed_run_on_ray_goes_on(tmp_path: Path, case: str) -> None:
    root, run_dir = make_inputs(tmp_path), tmp_path / "run"
    main = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray"]
    command = [*main, *words(root, run_dir, RAY_CASES[case])]
    run_killed(command, stop_at=random.choice([3, 4]), run_dir=run_dir)
    assert not (run_dir / "config.json").exists()
    output = run_killed(command, run_dir=run_dir)
    assert "resuming from" in output

    steps = steps_of(run_dir)
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    # Every step's samples were the policy's own, the first after the start too.
    assert all(step["vllm_kl"] < 1e-6 for step in steps)
    for step in range(1, NUM_STEPS + 1):
        rollouts = pandas.read_parquet(run_dir / "rollouts" / f"step_{step:06d}.parquet")
        assert set(rollouts.weight_version) == {step - 1}
    run_state = saved_run(run_dir / "ckpt" / f"global_step{NUM_STEPS}")
    ledger = run_state["sampler"]["ledger"]
    assert ledger["num_drawn"] == 2 * NUM_PROMPTS == sum(ledger["outcomes"].values())
    assert ledger["pending"] == [] and run_state["weight_version"] == NUM_STEPS
    weights, start = (load_file(p / "model.safetensors") for p in (run_dir, root / "model"))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    assert any(not torch.equal(weights[name], start[name]) for name in start)
    assert "nothing is left to do" in run_killed(command, run_dir=run_dir)
