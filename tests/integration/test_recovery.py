"""A run that loses processes goes on by itself: same steps, every prompt trained on once, engines
that hold the policy. Prints the seconds from each fault to a new engine that has proved to hold the
weights, whose first token comes a forward pass later, or to new ranks that have theirs.
"""

import os
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from openrlhf.cli import train_ppo_ray
from openrlhf.commands import train_rl
from openrlhf.rollout.engine_pool import Dispatcher
from openrlhf.rollout.rollout_queue import RolloutQueue
from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.trainer.ray import vllm_engine
from openrlhf.trainer.ray.vllm_engine import LLMRayActor
from openrlhf.utils.tracker import read_metrics
from tests.helpers.faults import (
    ACTOR,
    CRITIC,
    ENGINE,
    KILL,
    PHASES,
    REFERENCE,
    STOP,
    Fault,
    Faults,
    hook,
)
from tests.helpers.processes import (
    SFT_FLAGS,
    environment,
    launched,
    started,
    wait_until,
    workers,
)
from tests.helpers.stopped_runs import records, sums_of_states
from tests.integration.commands import SMALL, argv, run_command, steps_of
from tests.integration.ppo_runs import saved_run
from tests.tiny import write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1200)]

FLAGS = (
    f"{SMALL} --n_samples_per_prompt 2 --max_samples 8 --rollout_batch_size 4 "
    "--train_batch_size 8 --num_episodes 4 --generate_max_len 200 --actor_learning_rate 1e-3 "
    "--max_restarts 9 --engine_timeout_s 15 --rank_timeout_s 20"
)
NUM_STEPS, SEED = 8, 42
OF_ENGINES: dict[int, Fault] = {
    2: (ENGINE, "generate", KILL),
    3: (ENGINE, "update", KILL),
    4: (ENGINE, "sync", KILL),
    5: (ENGINE, "generate", STOP),
    6: (ENGINE, "update", STOP),
    7: (ENGINE, "sync", STOP),
}
OF_RANKS: dict[int, Fault] = {
    2: (ACTOR, "update", KILL),
    3: (CRITIC, "score", KILL),
    4: (REFERENCE, "score", KILL),
    5: (ACTOR, "sync", KILL),
    6: (ACTOR, "write", KILL),
    7: (ACTOR, "update", STOP),
    8: (ACTOR, "export", KILL),
}


def check(faults: Faults, given: dict, num_steps: int = NUM_STEPS) -> None:
    """Every step was made once, by samples of its policy, and every prompt trained on once."""
    steps = steps_of(given["save_path"])
    assert [step["step"] for step in steps] == list(range(1, num_steps + 1))
    # Every sample was the policy's of its step: else its log-probs would be others.
    assert all(step["vllm_kl"] < 1e-6 for step in steps if "vllm_kl" in step)
    ledger = faults.trainers[0].sampler.ledger
    assert ledger.outcomes == {"trained": 4 * num_steps} and not ledger.pending
    assert faults.struck_at.keys() == faults.plan.keys()


@pytest.mark.parametrize(
    ("num_engines", "more"),
    [(1, ""), (2, ""), (1, " --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep")],
    ids=["one", "two", "sleeping"],
)
def test_a_run_goes_on_with_new_engines_in_place_of_lost_ones(
    ray_cluster: None,
    given: dict,
    faults: Faults,
    capsys: pytest.CaptureFixture,
    num_engines: int,
    more: str,
) -> None:
    faults.plan = OF_ENGINES
    flags = f"{FLAGS} --advantage_estimator group_norm --init_kl_coef 0{more}"
    train_ppo_ray.main(argv("", sizes=f"{flags} --vllm_num_engines {num_engines}", **given))
    check(faults, given)
    [trainer] = faults.trainers
    assert sum(engine.num_starts for engine in trainer.engines) == num_engines + len(OF_ENGINES)
    with capsys.disabled():
        faults.show(f"{num_engines} engine(s){more}")


class FailingEngine(LLMRayActor):
    """It tells of its tokens, and its device fails in a forward pass, but not that of the engine in
    its place.
    """

    def ready(self) -> str:
        address, step = super().ready(), self.llm.step

        def run() -> Any:
            if self.settings["seed"] == SEED:
                if self.num_steps == 50:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                time.sleep(0.1)  # its health is asked for meanwhile
                self._reported_at = 0.0
            return step()

        self.llm.step = run
        return address


def test_a_run_goes_on_with_a_new_engine_in_place_of_one_whose_device_fails(
    ray_cluster: None,
    given: dict,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(vllm_engine, "LLMRayActor", FailingEngine)
    num_kept: list[int] = []
    rest = Dispatcher._rest

    async def count(self: Dispatcher, request: Any, k: int, begun: Any, home: Any) -> Any:
        num_kept.append(len(begun.token_ids))
        return await rest(self, request, k, begun, home)

    monkeypatch.setattr(Dispatcher, "_rest", count)
    flags = f"{FLAGS} --advantage_estimator group_norm --init_kl_coef 0 --vllm_num_engines 2"
    train_ppo_ray.main(argv("", sizes=f"{flags} --seed {SEED}", **given))
    check(faults, given)
    assert [engine.num_starts for engine in faults.trainers[0].engines] == [2, 1]
    # The log-probs of the others' tokens were the trainer's, too: `check` has compared them.
    assert len(num_kept) == 4 and min(num_kept) >= 5
    said = " ".join(capfd.readouterr().err.split())
    assert "vLLM engine is down: CUDA error: an illegal memory access was encountered" in said


def test_a_run_goes_on_from_its_last_checkpoint_with_new_ranks(
    ray_cluster: None,
    given: dict,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    critic_dir: Any,
) -> None:
    faults.plan = OF_RANKS
    hook(monkeypatch, train_rl, "_export", before=lambda it: faults.begin(it, "export"))
    flags = (
        f"{FLAGS} --advantage_estimator gae --init_kl_coef 0.01 --save_steps 1 --zero_stage 2 "
        "--vllm_num_engines 1 --actor_num_gpus_per_node 2"
    )
    given |= {"ckpt_path": given["save_path"] / "ckpt", "critic_pretrain": critic_dir}
    train_ppo_ray.main(argv("", sizes=flags, **given))
    check(faults, given)
    state = saved_run(given["ckpt_path"] / f"global_step{NUM_STEPS}")
    assert state["weight_version"] == NUM_STEPS
    with capsys.disabled():
        faults.show("2 ranks")


EXACT: dict[int, Fault] = {
    2: (ACTOR, "update", KILL),
    3: (REFERENCE, "score", KILL),
    4: (CRITIC, "update", KILL),
    5: (ACTOR, "save", KILL),
    6: (ACTOR, "generate", KILL),
}


def test_a_run_that_lost_ranks_is_the_run_that_lost_none(
    ray_cluster: None, given: dict, faults: Faults, critic_dir: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = (
        f"{FLAGS} --advantage_estimator gae --init_kl_coef 0.01 --save_steps 1 --zero_stage 2 "
        "--vllm_num_engines 0 --actor_num_gpus_per_node 2 --max_samples 4 --num_episodes 6 "
        "--seed 7"
    )
    runs = [given["save_path"] / name for name in ("straight", "faults")]
    for run, plan in zip(runs, ({}, EXACT), strict=True):
        faults.plan = plan
        mine = given | {"save_path": run, "ckpt_path": run / "ckpt", "critic_pretrain": critic_dir}
        train_ppo_ray.main(argv("", sizes=flags, **mine))
    assert faults.struck_at.keys() == EXACT.keys()
    assert len(records(runs[0])) >= 6 and records(runs[0]) == records(runs[1])
    assert len(sums := sums_of_states(runs[0], 6)) == 3 and sums == sums_of_states(runs[1], 6)
    straight, faulty = (load_file(run / "model.safetensors") for run in runs)
    assert all(torch.equal(straight[name], faulty[name]) for name in straight | faulty)
    with capsys.disabled():
        faults.show("exactly")


# All that may be lost; OPENRLHF_SOAK_STEPS=300 makes a long one of it, with a fault in ten steps.
PHASES_OF = {
    ENGINE: ("generate", "update", "sync"),
    ACTOR: tuple(PHASES),
    CRITIC: ("score", "update", "save"),
    REFERENCE: ("score",),
}
MAY_BE_LOST = [
    (title, phase, how)
    for title, phases in PHASES_OF.items()
    for phase in phases
    for how in (KILL, STOP)
]


@pytest.mark.timeout(7200)
def test_a_long_run_outlives_faults_of_all_kinds(
    ray_cluster: None, given: dict, faults: Faults, capsys: pytest.CaptureFixture, critic_dir: Path
) -> None:
    num_steps = int(os.environ.get("OPENRLHF_SOAK_STEPS", "12"))
    seed = int(os.environ.get("OPENRLHF_SOAK_SEED", time.time_ns() % 1000))
    draw = random.Random(seed)
    struck = sorted(draw.sample(range(2, num_steps), max(num_steps // 10, 4)))
    for step in struck:  # odd steps are not saved
        saves = {"save", "write"} if step % 2 else set()
        possible = [fault for fault in MAY_BE_LOST if fault[1] not in saves]
        faults.plan[step] = draw.choice(possible)
    flags = (
        f"{FLAGS} --advantage_estimator gae --init_kl_coef 0.01 --save_steps 2 --zero_stage 2 "
        "--vllm_num_engines 2 --actor_num_gpus_per_node 2 --max_restarts 99 "
        f"--num_episodes {num_steps // 2}"
    )
    given |= {"ckpt_path": given["save_path"] / "ckpt", "critic_pretrain": critic_dir}
    with capsys.disabled():
        print(f"\nOPENRLHF_SOAK_SEED={seed}, faults by step: {faults.plan}", flush=True)
    train_ppo_ray.main(argv("", sizes=flags, **given))
    check(faults, given, num_steps)
    [said] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("goodput ")]
    with capsys.disabled():
        faults.show(f"seed {seed}")
        print(f"seed {seed}: {len(struck)} faults in {num_steps} steps: {said}")


def test_an_asynchronous_run_goes_on_from_an_older_checkpoint(
    ray_cluster: None, given: dict, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (
        f"{FLAGS} --async_train --partial_rollout --async_queue_size 2 --save_steps 3 "
        "--advantage_estimator reinforce_baseline --init_kl_coef 0 --vllm_num_engines 1"
    )

    def strike(queue: RolloutQueue) -> None:
        if queue.sampler.ledger.outcomes["trained"] == 5 * 4 and not faults.struck_at:
            faults.struck_at[6] = time.monotonic()
            workers(ACTOR)[0].kill()

    hook(monkeypatch, RolloutQueue, "settle", after=strike)
    hook(monkeypatch, PPOTrainer, "report", before=lambda trainer: faults.trainers.append(trainer))
    given["ckpt_path"] = given["save_path"] / "ckpt"
    train_ppo_ray.main(argv("", sizes=flags, **given))
    steps = steps_of(given["save_path"])
    assert faults.struck_at and [s["step"] for s in steps] == list(range(1, NUM_STEPS + 1))
    assert max(step["staleness_max"] for step in steps) <= 2
    ledger = faults.trainers[0].sampler.ledger
    assert ledger.outcomes == {"trained": 32} and not ledger.pending


def test_torchrun_starts_the_ranks_of_a_run_again_which_goes_on_by_itself(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i} and", "completion": "two words"} for i in range(320)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    launcher = "torchrun --max_restarts 2 --nproc_per_node 2 --master_port {port} -m {module}"

    def words(run: Path) -> list[str]:
        flags = f"--pretrain {tiny_model_dir} --dataset {tmp_path}/rows.jsonl --save_path {run} "
        flags += f"--ckpt_path {run}/ckpt --save_steps 4 --load_checkpoint {SFT_FLAGS}"
        return [*launched("train_sft", launcher), *flags.split()]

    struck, straight = tmp_path / "struck", tmp_path / "straight"
    with started(words(struck), env=environment()) as process:
        wait_until(lambda: (struck / "ckpt/global_step4").exists(), 240)
        family = psutil.Process(process.pid).children(recursive=True)
        [rank] = [p for p in family if p.environ().get("LOCAL_RANK") == "1"]
        rank.kill()
        _, said = process.communicate(timeout=240)
    assert process.returncode == 0 and "exitcode: -9" in said, said[-3000:]
    run_command(*words(straight), env=environment())
    losses = [
        [(record["step"], record["gpt_loss"]) for record in read_metrics(run / "metrics.jsonl")]
        for run in (struck, straight)
    ]
    assert len(losses[0]) == 40 and losses[0] == losses[1]
