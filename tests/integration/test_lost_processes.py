"""A run that loses an engine and a rank goes on: the quick part of test_fault_matrix."""

import re

import pytest

from openrlhf.cli import train_ppo_ray
from tests.helpers.faults import ACTOR, ENGINE, KILL, Faults
from tests.integration.commands import SMALL, argv, steps_of


def test_a_run_that_loses_an_engine_and_a_rank_makes_every_step_once(
    ray_cluster: None, given: dict, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.plan = {2: (ENGINE, "generate", KILL), 4: (ACTOR, "update", KILL)}
    flags = (
        f"{SMALL} --n_samples_per_prompt 2 --max_samples 4 --rollout_batch_size 2 "
        "--train_batch_size 4 --num_episodes 2 --generate_max_len 100 --save_steps 1 "
        "--advantage_estimator group_norm --init_kl_coef 0 --vllm_num_engines 1"
    )
    given |= {"ckpt_path": given["save_path"] / "ckpt"}
    train_ppo_ray.main(argv("", sizes=flags, **given))
    steps = steps_of(given["save_path"])
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["vllm_kl"] < 1e-6 for step in steps)  # samples of the policy of their step
    [trainer] = faults.trainers
    assert trainer.sampler.ledger.outcomes == {"trained": 8}
    assert faults.seconds.keys() == faults.plan.keys()
    said = capsys.readouterr().err
    for who, end in (("vllm-0", r"The end of \S+vllm-0\.log: \S"), ("actor rank 0 of 1", "")):
        died = rf"warning: {who} on node [\d.]+ died: pid \d+ ended .*SIGKILL.*{end}"
        assert re.search(died, said), said
