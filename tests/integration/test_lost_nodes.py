"""A cluster that loses a node in each phase of a step: the run goes on on another one."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from tests.helpers.faults import ENGINE, STOP
from tests.helpers.lost_nodes import NUM_STEPS, PLAN
from tests.integration.commands import SMALL, argv, run_command, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1900)]

ROOT = Path(__file__).resolve().parents[2]
CALLER = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "GLOO_SOCKET_IFNAME": "lo"}


def test_a_run_goes_on_where_the_node_of_its_engine_or_of_a_model_is_lost(
    given: dict, critic_dir: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = (
        f"{SMALL} --advantage_estimator gae --n_samples_per_prompt 2 --init_kl_coef 0.01 "
        "--max_samples 8 --rollout_batch_size 4 --train_batch_size 8 --generate_max_len 100 "
        f"--actor_learning_rate 1e-3 --save_steps 1 --num_episodes {NUM_STEPS // 2} "
        "--max_restarts 99 --engine_timeout_s 15 --rank_timeout_s 20 --vllm_num_engines 1"
    )
    given |= {"ckpt_path": given["save_path"] / "ckpt", "critic_pretrain": critic_dir}
    unwanted = ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")
    inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        env = inherited | CALLER | {"RAY_TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        words = ("-m", "tests.helpers.lost_nodes", *argv("", sizes=flags, **given))
        said = run_command(*words, timeout=1800, env=env)
    [line] = [line for line in said.splitlines() if line.startswith('{"outcomes"')]
    found = json.loads(line)
    # Each loss counts once for its role: at most six times, of the policy.
    said = " ".join(said.split())
    assert "restart 6 of 99" in said and "restart 7 of 99" not in said
    steps = steps_of(given["save_path"])
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    # Every sample was the policy's of its step: else its log-probs would be others.
    assert all(step["vllm_kl"] < 1e-6 for step in steps if "vllm_kl" in step)
    assert found["outcomes"]["trained"] == 4 * NUM_STEPS and not found["pending"]
    of_engines = [step for step, (title, _, _) in PLAN.items() if title == ENGINE]
    assert said.count("is up again, ") == len(of_engines)
    # A stopped raylet leaves its engine at work; Ray calls the node dead at the next loss.
    unfelt = {step for step in of_engines if PLAN[step][2] is STOP}
    assert {*map(int, found["seconds"])} == PLAN.keys() - unfelt
    with capsys.disabled():
        for step, seconds in found["seconds"].items():
            title, phase, how = PLAN[int(step)]
            print(f"node of {title}, {how.name} in {phase}: {seconds:.1f} s")
