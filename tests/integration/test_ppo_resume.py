"""An RL command that was killed goes on, typed again, bit for bit as if it had not been: weights,
optimizers, random numbers, ledger and log.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.commands import run_command
from tests.integration.ppo_runs import (
    GRPO,
    NUM_PROMPTS,
    PPO,
    make_inputs,
    saved_run,
    start,
    steps_of,
    words,
)
from tests.stopped_runs import records, stopping_behind

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
    assert start(root, run_dir, more, "--temperature", "0.9") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "global_step3 is damaged and passed over" in said
    assert [record["step"] for record in steps_of(run_dir)] == list(range(1, NUM_STEPS + 1))


def launch(root: Path, run_dir: Path, flags: str, *more: str, num_ranks: int = 2) -> None:
    """One start on Ray with several ranks a role, which generate themselves."""
    ranks = [f"--{role}_num_gpus_per_node={num_ranks}" for role in ("actor", "critic", "ref")]
    typed = [*words(root, run_dir, flags, *more), *ranks, "--vllm_num_engines", "0"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
    run_command("-m", "openrlhf.cli.train_ppo_ray", *typed, env=env)


PROMPT_LOG = r"""
from pathlib import Path

def reward_func(queries, prompts, labels):
    with Path(__file__).with_name("prompts.txt").open("a") as file:
        file.writelines(f"{prompt}\n" for prompt in prompts)
    return [len(set(query)) / 9 for query in queries]
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_from_two_ranks_to_one_and_back_with_the_same_prompts(
    root: Path, tmp_path: Path
) -> None:
    flags = f"{PPO} --init_kl_coef 0.05 --lr_scheduler constant --save_steps 1 --load_checkpoint"
    starts = {"straight": [(2, 2, 3)], "resumed": [(2, 2, 1), (1, 3, 2), (2, 3, 3)]}
    prompts = {}
    for run, each in starts.items():
        folder = tmp_path / run
        folder.mkdir()
        (folder / "reward.py").write_text(PROMPT_LOG)
        for num_ranks, zero_stage, num_episodes in each:
            settings = f"--zero_stage {zero_stage} --num_episodes {num_episodes}"
            settings += f" --use_ds_universal_ckpt --remote_rm_url {folder}/reward.py"
            launch(root, folder, flags, *settings.split(), num_ranks=num_ranks)
        lines = (folder / "prompts.txt").read_text().splitlines()
        prompts[run] = [sorted(lines[2 * k : 2 * k + 8]) for k in (0, 4, 11, 15, 22, 26)]
    assert prompts["resumed"] == prompts["straight"]
    steps = [record["step"] for record in steps_of(tmp_path / "resumed")]
    assert steps == list(range(1, 10))
    last = [tmp_path / run / "ckpt" / "global_step9" for run in starts]
    assert saved_run(last[0])["sampler"] == saved_run(last[1])["sampler"]
    facts = [json.loads((path / "actor" / "engine.json").read_text()) for path in last]
    assert facts[0]["schedule"]["last_epoch"] == facts[1]["schedule"]["last_epoch"] == 9
