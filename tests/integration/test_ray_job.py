"""Clusters of `ray start --head`: jobs submitted to one, and demands that it cannot meet."""

import json
import shutil
from pathlib import Path

import psutil
import pytest

from tests.integration.commands import argv, run_command, steps_of
from tests.integration.heads import Head, ray_command, running_head
from tests.integration.test_interrupt import saved_step, wait_for_a_step

GRPO_JOB = (
    "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "
    "--label_key answer --max_samples 8 --vllm_num_engines 1"
)


# Runs in a process of its own: this one may be connected to another cluster.
SCENARIO = """
import json, sys, threading, time

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from openrlhf.errors import ConfigError
from openrlhf.trainer.ray.placement import RoleDemand, place, view_cluster

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
cluster = view_cluster()
demands = [RoleDemand("actor", 1, "actor"), RoleDemand("vllm", 1, "vllm")]
other_job = placement_group([{"GPU": 1, "CPU": 1}])
assert other_job.wait(10)


def timed_place(demands, deadline_s):
    start = time.monotonic()
    try:
        slots, _ = place(demands, cluster, deadline_s=deadline_s)
    except ConfigError as error:
        return {"error": str(error), "code": error.exit_code, "s": time.monotonic() - start}
    return {"roles": sorted(slots), "s": time.monotonic() - start}


too_large = timed_place([RoleDemand("actor", 3, "actor")], 20)
busy = timed_place(demands, 3)
threading.Timer(1.5, remove_placement_group, [other_job]).start()
freed = timed_place(demands, 20)
print(json.dumps({"too_large": too_large, "busy": busy, "freed": freed}))
"""


def job(head: Head, command: str, *words: str) -> str:
    """What `ray job` printed; it must succeed."""
    at = ("--address", head.dashboard)
    return run_command(ray_command(), "job", command, *at, *words, env=head.environment())


@pytest.mark.slow
def test_a_job_trains_in_its_folder_one_that_is_stopped_saves_and_nothing_is_left(
    given: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job"  # what a user has beside the command
    shutil.copytree(given["pretrain"], folder / "model")
    shutil.copy(given["prompt_data"], folder / "prompts.jsonl")
    shutil.copy(given["remote_rm_url"], folder / "reward_func.py")
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "120")  # 3 s unless the head is told

    def entrypoint(run_dir: Path, more: str) -> list[str]:
        words = argv(
            f"{GRPO_JOB} {more}",
            pretrain="model",
            prompt_data="prompts.jsonl",
            remote_rm_url="reward_func.py",
            train_batch_size="16",
            save_path=run_dir,
            ckpt_path=run_dir / "ckpt",
        )
        return ["--", "python3", "-m", "openrlhf.cli.train_ppo_ray", *words]

    place, first, second = f"--working-dir={folder}", tmp_path / "first", tmp_path / "second"
    with running_head("--num-cpus", "2", has_dashboard=True) as head:
        assert "step 1/1" in job(head, "submit", place, *entrypoint(first, ""))
        endless = entrypoint(second, "--num_episodes 2000")
        job(head, "submit", "--no-wait", "--submission-id=it", place, *endless)
        wait_for_a_step(second, head.process)
        assert "was stopped" in job(head, "stop", "it")
        saved_step(job(head, "logs", "it"), second / "ckpt")
        family = head.processes()
    [step] = steps_of(first)
    assert step["ratio_max"] == 1.0 and step["vllm_kl"] < 1e-6
    assert (first / "config.json").exists()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


@pytest.mark.slow
def test_a_busy_cluster_is_waited_for_until_the_deadline_and_a_small_one_not() -> None:
    with running_head("--num-cpus", "4", "--num-gpus", "2", has_dashboard=False) as head:
        said = run_command("-c", SCENARIO, head.address, timeout=120, env=head.environment())
    [line] = [line for line in said.splitlines() if line.startswith('{"too_large"')]
    outcome = json.loads(line)
    too_large, busy, freed = (outcome[name] for name in ("too_large", "busy", "freed"))
    assert too_large["s"] < 1.0 and too_large["code"] == 2
    assert "need 3 x GPU, have 2" in too_large["error"]
    assert 3.0 <= busy["s"] < 5.0 and busy["code"] == 2
    assert "need 2 x GPU, have 2" in busy["error"]
    assert freed["roles"] == ["actor", "vllm"] and 1.0 < freed["s"] < 10.0
