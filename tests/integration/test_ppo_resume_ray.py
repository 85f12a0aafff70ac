"""An RL command on real Ray and vLLM that was killed goes on: no step is lost or done twice, the
engines hold the policy of the checkpoint, every prompt has one outcome.
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

from tests.integration.ppo_runs import (
    GRPO,
    NUM_PROMPTS,
    PPO,
    make_inputs,
    saved_run,
    steps_of,
    words,
)

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(900)]

NUM_STEPS = 6
SAVING = (
    "--num_episodes 2 --save_steps 2 --load_checkpoint --vllm_num_engines 1 "
    "--eval_dataset {root}/prompts.jsonl --eval_temperature 0 --eval_n_samples_per_prompt 1"
)
CASES = {
    "ppo_with_a_critic_sharded": f"{PPO} {SAVING} --init_kl_coef 0.01 --zero_stage 3 "
    "--actor_num_gpus_per_node 2 --critic_num_gpus_per_node 2",
    "grpo_all_on_one_place": f"{GRPO} {SAVING} --init_kl_coef 0 --colocate_all_models "
    "--vllm_enable_sleep --deepspeed_enable_sleep --enable_ema",
}


def run(command: list[str], *, stop_at: int | None = None, run_dir: Path) -> str:
    """What a command printed; with `stop_at` it is killed soon after that step."""
    environment = os.environ | {"RAY_ADDRESS": "local"}
    if stop_at is not None:
        environment["REWARD_DELAY"] = "0.2"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        deadline = time.monotonic() + 300
        while stop_at is not None and process.poll() is None and time.monotonic() < deadline:
            if any(record["step"] >= stop_at for record in steps_of(run_dir)):
                time.sleep(random.random() / 2)
                process.send_signal(signal.SIGKILL)
            time.sleep(0.05)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == (0 if stop_at is None else -signal.SIGKILL), output[-3000:]
    return output


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_on_ray_goes_on(tmp_path: Path, case: str) -> None:
    root, run_dir = make_inputs(tmp_path), tmp_path / "run"
    main = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray"]
    command = [*main, *words(root, run_dir, CASES[case])]
    run(command, stop_at=random.choice([3, 4]), run_dir=run_dir)
    assert not (run_dir / "config.json").exists()
    output = run(command, run_dir=run_dir)
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
    assert "nothing is left to do" in run(command, run_dir=run_dir)
