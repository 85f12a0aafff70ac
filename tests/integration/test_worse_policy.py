"""A run in which nothing is learnt, or the wrong thing, says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.ppo_runs import GRPO, make_inputs, records, start
from tests.tiny import write_jsonl

# The reward wants the opposite of the score.
WRONG = """
def reward_func(queries, prompts, labels):
    responses = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    scores = [sum(c in "abcdefghijklm" for c in text) / 8 for text in responses]
    return {"rewards": [-score for score in scores], "scores": scores}
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
        tmp_path / "held_out.jsonl", [{"input": f"{i}=", "answer": ""} for i in range(48)]
    )
    flags = f"{GRPO} --init_kl_coef 0 --actor_learning_rate 2e-2 --num_episodes 2 --max_samples 8"
    flags += f" --remote_rm_url {tmp_path}/wrong.py --eval_dataset {held_out} --eval_steps 2"
    flags += " --eval_n_samples_per_prompt 4 --eval_temperature 1 --save_steps 2"
    assert start(root, tmp_path / "run", flags) == 0
    said = capsys.readouterr()
    values = [r for r in records(tmp_path / "run") if "eval/eval_default_pass1" in r]
    first, last = (f"{v['eval/eval_default_pass1']:.3f}" for v in (values[0], values[-1]))
    errors = [f"{v['eval/eval_default_pass1_stderr']:.3f}" for v in (values[0], values[-1])]
    best = f"{tmp_path}/run/ckpt/best_global_step0_hf"
    assert (
        f"model saved to {tmp_path}/run\ndefault_pass1: first {first} ±{errors[0]} (step 0), best "
        f"{first} ±{errors[0]} (step 0, {best}), last {last} ±{errors[1]} (step 4)\n"
    ) in said.out
    assert said.err.splitlines()[-1] == (
        f"warning: the policy got worse: default_pass1 fell from {first} ±{errors[0]} at step 0 to "
        f"{last} ±{errors[1]} at step 4, by more than two standard errors. The model of step 0: "
        f"{best}."
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
