"""A run in which nothing is learnt, or the wrong thing, says so."""

from pathlib import Path

import pytest

from tests.integration.ppo_runs import GRPO, make_inputs, records, start
from tests.tiny import write_jsonl

# Held-out samples are right until a step was trained on.
WRONG = """
from pathlib import Path

TRAINED = Path(__file__).with_name("trained")

def reward_func(queries, prompts, labels):
    if labels[0] == "held out":
        return [float(not TRAINED.exists())] * len(queries)
    TRAINED.touch()
    return [len(query) % 3 for query in queries]
"""
EQUAL = """
def reward_func(queries, prompts, labels):
    return [0.25] * len(queries)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("worse"))


def test_a_policy_that_got_worse_is_the_last_line_with_where_the_best_is(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    held_out = write_jsonl(
        tmp_path / "held_out.jsonl", [{"input": f"{i}=", "answer": "held out"} for i in range(4)]
    )
    flags = f"{GRPO} --init_kl_coef 0 --num_episodes 2 --max_samples 8"
    flags += f" --remote_rm_url {tmp_path}/wrong.py --eval_dataset {held_out} --eval_steps 2"
    flags += " --save_steps 2"
    assert start(root, tmp_path / "run", flags) == 0
    said = capsys.readouterr()
    values = [r for r in records(tmp_path / "run") if "eval/eval_default_pass1" in r]
    assert [v["eval/eval_default_pass1"] for v in values] == [1, 0, 0]
    best = f"{tmp_path}/run/ckpt/best_global_step0_hf"
    assert (
        f"model saved to {tmp_path}/run\ndefault_pass1: first 1.000 ±0.000 (step 0), best 1.000 "
        f"±0.000 (step 0, {best}), last 0.000 ±0.000 (step 4)\n"
    ) in said.out
    assert said.err.splitlines()[-1] == (
        "warning: the policy got worse: default_pass1 fell from 1.000 ±0.000 at step 0 to 0.000 "
        f"±0.000 at step 4, by more than two standard errors. The model of step 0: {best}."
    )
    assert Path(best, "config.json").is_file()


def test_the_hint_of_equal_rewards_shows_a_sample_and_where_all_are(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "equal.py").write_text(EQUAL)
    flags = f"{GRPO} --init_kl_coef 0 --max_samples 4 --remote_rm_url {tmp_path}/equal.py"
    assert start(root, tmp_path / "run", flags) == 0
    [hint] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hint: all")]
    assert ' One of them: "' in hint and '", label "' in hint and ", reward 0.25. " in hint
    assert hint.endswith(f"All are in {tmp_path}/run/rollouts/step_000001.parquet.")
    assert len(hint) < 600
