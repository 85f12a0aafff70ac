"""What of RL shows only in a whole run, on the Hugging Face engine: the effect of settings, a
policy that got worse, memory that does not grow.
"""

import contextlib
import io
import json
import re
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from transformers import AutoTokenizer

from openrlhf.algorithms.kl import adaptive_kl_coef
from openrlhf.cli import replay, train_ppo
from openrlhf.distributed.collectives import shut_down
from openrlhf.models.loading import load_causal_lm, load_sequence_model
from openrlhf.models.value_head import RewardModel
from openrlhf.utils.packing import PackedBatch
from tests.helpers.stopped_runs import records
from tests.integration.commands import argv, exit_code, run_command, steps_of
from tests.integration.ppo_runs import GRPO, PPO, make_inputs, start, words
from tests.tiny import write_jsonl


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("ppo_runs"))


@pytest.fixture(scope="module")
def ppo(root: Path) -> Path:
    """Three steps of PPO; the policy is frozen in the first."""
    flags = (
        f"{PPO} --init_kl_coef 0.05 --kl_target 0.01 --kl_horizon 50 --max_epochs 2 "
        "--freezing_actor_steps 1 --save_value_network --critic_pretrain {root}/reward_model "
        "--lr_scheduler constant --reward_clip_range -10 10 --dump 3 "
        "--overlong_buffer_len 4 --overlong_penalty_factor 3"
    )
    assert start(root, root / "ppo", flags) == 0
    return root / "ppo"


def test_the_first_steps_train_the_critic_alone(ppo: Path) -> None:
    steps = steps_of(ppo)
    assert ["policy_loss" in step for step in steps] == [False, True, True]
    assert all("critic_loss" in step for step in steps)
    assert [step.get("actor_update_ratio", 0.0) > 0 for step in steps] == [False, True, True]
    versions = [
        pandas.read_parquet(ppo / "rollouts" / f"step_{step:06d}.parquet").weight_version.unique()
        for step in (1, 2, 3)
    ]
    # The second step still samples from the policy as it was at the start.
    assert [list(found) for found in versions] == [[0], [0], [1]]


def test_a_row_of_rollouts_holds_what_was_computed_for_its_tokens(ppo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ppo)
    for step in (1, 3):
        rows = pandas.read_parquet(ppo / "rollouts" / f"step_{step:06d}.parquet")
        assert list(rows.group_id) == sorted([*range(len(rows) // 2)] * 2)
        for row in rows.to_dict("records"):
            assert list(row["token_texts"]) == list(map(tokenizer.decode, row["token_ids"]))
            assert len(row["action_mask"]) == len(row["token_ids"])
            assert row["action_mask"].sum() == row["num_actions"]
            names = ("logprobs", "old_logprobs", "advantages", "weight_versions")
            assert {len(row[name]) for name in names} == {row["num_actions"]}
            assert row["advantage"] == pytest.approx(row["advantages"].mean(), rel=1e-5)
            assert np.allclose(row["old_logprobs"], row["logprobs"], atol=1e-4)
            if step == 1:  # the critic alone is trained
                assert row["new_logprobs"] is None
            else:  # in the first epoch the policy is still the old one
                assert np.allclose(row["new_logprobs"], row["old_logprobs"], atol=1e-5)


def test_a_replay_of_a_kept_step_has_the_numbers_of_the_run(
    ppo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(replay.main, [str(ppo), "--step", "3"]) == 0
    said = capsys.readouterr().out
    run = steps_of(ppo)[2]
    for name in ("policy_loss", "critic_loss", "actor_grad_norm", "critic_grad_norm"):
        assert f"  {name:<20} {run[name]:.17g}\n" in said
    assert "numbers are those of the run to the last bit" in said
    tokens = pandas.read_parquet(ppo / "dumps" / "step_000003" / "tokens.parquet")
    rows = pandas.read_parquet(ppo / "rollouts" / "step_000003.parquet")
    for name in ("new_logprobs", "advantages"):
        assert np.array_equal(tokens[name], np.concatenate(rows[name]))
    assert np.allclose(tokens.log_ratio, tokens.new_logprobs - tokens.old_logprobs, atol=1e-6)
    assert np.allclose(tokens.loss, -tokens.advantages * np.exp(tokens.log_ratio), atol=1e-6)
    assert {"kl", "is_clipped", "value_loss", "returns"} < set(tokens.columns)


def test_a_replay_of_a_step_that_was_not_kept_names_those_that_were(
    ppo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(replay.main, [str(ppo), "--step", "2"]) == 2
    assert capsys.readouterr().err == (
        f"error: step 2 of {ppo} was not kept: kept are 3. Type --step with one of those, or train "
        "with --dump 2.\n"
    )
    (tmp_path / "config.yaml").write_text("train:\n  seed: 1\n")
    assert exit_code(replay.main, [str(tmp_path)]) == 2
    assert "is no run of openrlhf ppo or ppo-local" in capsys.readouterr().err


def test_an_update_whose_gradient_is_not_finite_is_skipped_and_kept_for_a_replay(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "huge.py").write_text(HUGE)
    flags = f"{GRPO} --init_kl_coef 0 --advantage_estimator rloo --reward_clip_range -3e38 3e38"
    assert start(root, tmp_path / "run", flags, "--remote_rm_url", f"{tmp_path}/huge.py") == 0
    said = capsys.readouterr()
    [kept] = (tmp_path / "run" / "dumps").iterdir()
    step = int(kept.name[-6:])
    assert f"step {step} was kept: openrlhf replay {tmp_path}/run --step {step}\n" in said.out
    problem = "the gradient norm is nan"
    warned = f"step {step}: an update of the actor was skipped, its weights stay: {problem}."
    assert warned in " ".join(said.err.split())
    skipped = {
        s["step"]: s["num_skipped_updates"] for s in steps_of(tmp_path / "run")[step - 1 : step]
    }
    assert skipped == {step: 1}
    assert exit_code(replay.main, [str(tmp_path / "run"), "--step", str(step)]) == 0
    said = capsys.readouterr().out
    assert f"the run failed: {problem}\nthe replay: {problem}\n" in said
    assert "3e+38" in said
    told = kept / "step.json"
    for num_done in (1, 2):  # of its two updates: one is left, or none
        told.write_text(
            json.dumps(json.loads(told.read_text()) | {"num_done": {"actor": num_done}})
        )
        assert exit_code(replay.main, [str(tmp_path / "run"), "--step", str(step)]) == 0


def test_the_kl_coefficient_follows_the_measured_kl(ppo: Path) -> None:
    coef = 0.05
    for step, num_samples in zip(steps_of(ppo), (8, 8, 6), strict=True):
        assert step["kl_coef"] == pytest.approx(coef, rel=1e-9)
        coef = adaptive_kl_coef(coef, step["kl"], target=0.01, horizon=50, num_samples=num_samples)
    assert coef != pytest.approx(0.05, rel=1e-3)


def test_policy_and_critic_learn_in_adapters_beside_a_reference(
    tiny_model_dir: Path, reward_model_dir: Path, prompt_file: Path, tmp_path: Path
) -> None:
    train_ppo.main(
        argv(
            "--advantage_estimator gae --init_kl_coef 0.01 --lora_rank 4 --num_episodes 2 "
            "--actor_learning_rate 1e-2 --critic_learning_rate 1e-2 --n_samples_per_prompt 2 "
            "--train_batch_size 16 --save_value_network",
            pretrain=tiny_model_dir,
            reward_pretrain=reward_model_dir,
            prompt_data=prompt_file,
            save_path=tmp_path / "run",
        )
    )
    shut_down()
    steps = steps_of(tmp_path / "run")
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-6)  # the adapter begins as nothing
    assert abs(steps[-1]["kl"]) > 1e-4
    for step in steps:
        assert step["actor_grad_norm"] > 0 and step["critic_grad_norm"] > 0
        assert step["vllm_kl"] < 1e-3  # generated by the adapted policy, not by its base

    base = load_causal_lm(str(tiny_model_dir))
    policy = load_causal_lm(str(tmp_path / "run"))
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        assert (base(ids).logits - policy(ids).logits).abs().max() > 1e-3
        first, last = (
            RewardModel(load_sequence_model(path)).eval()(
                PackedBatch.from_sequences([ids[0]], [torch.zeros(20)])
            )
            for path in (reward_model_dir, tmp_path / "run_critic")
        )
    assert (first.scores - last.scores).abs().max() > 1e-3


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
HUGE = """
def reward_func(queries, prompts, labels):
    return [3e38 if label == "10" and k % 4 == 1 else 0.0 for k, label in enumerate(labels)]
"""
EQUAL = """
def reward_func(queries, prompts, labels):
    return [0.25] * len(queries)
"""


@pytest.fixture(scope="module")
def worse(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The folder of a run whose evaluations at steps 0, 2 and 4 fell, its output and its errors."""
    folder = tmp_path_factory.mktemp("worse")
    (folder / "wrong.py").write_text(WRONG)
    rows = [{"input": f"{i}=", "answer": "held out"} for i in range(4)]
    held_out = write_jsonl(folder / "held_out.jsonl", rows)
    flags = f"{GRPO} --init_kl_coef 0 --num_episodes 2 --max_samples 8 --save_steps 2"
    flags += f" --remote_rm_url {folder}/wrong.py --eval_dataset {held_out} --eval_steps 2"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert start(root, folder / "run", flags) == 0
    return folder / "run", out.getvalue(), err.getvalue()


def test_a_policy_that_got_worse_is_the_last_line_with_where_the_best_is(
    worse: tuple[Path, str, str],
) -> None:
    run, out, err = worse
    values = [r for r in records(run) if "eval/eval_default_pass1" in r]
    assert [v["eval/eval_default_pass1"] for v in values] == [1, 0, 0]
    best = f"{run}/ckpt/best_global_step0_hf"
    assert f"model saved to {run}, beside metrics.jsonl, rollouts, logs\n" in out
    assert out.splitlines()[-1] == (
        f"default_pass1: first 1.000 ±0.000 (step 0), best 1.000 ±0.000 (step 0, {best}), last "
        "0.000 ±0.000 (step 4)"
    )
    assert err.splitlines()[-1] == (
        "warning: the model got worse: default_pass1 fell from 1.000 ±0.000 at step 0 to 0.000 "
        f"±0.000 at step 4, by more than two standard errors. The model of step 0: {best}."
    )
    assert Path(best, "config.json").is_file()


def test_the_samples_of_every_evaluation_are_kept_and_in_the_report(
    worse: tuple[Path, str, str],
) -> None:
    run, _, _ = worse
    data = re.search(r'id="data">(.*?)</script>', (run / "report.html").read_text(), re.DOTALL)
    [page] = json.loads(data[1])["runs"]
    for step, reward in ((0, 1), (2, 0), (4, 0)):
        file = f"eval_step_{step:06d}.parquet"
        rows = pandas.read_parquet(run / "rollouts" / file)
        assert list(rows.prompt) == [f"{i}=" for i in range(4) for _ in range(4)]
        assert set(rows.label) == {"held out"} and set(rows.reward) == {reward}
        shown = [sample for sample in page["samples"] if sample["file"] == file]
        assert [sample["response"] for sample in shown] == list(rows.response)
        label = f"evaluation at step {step} (16 samples)"
        assert {"name": file, "label": label} in page["files"]


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


NUM_STEPS, SETTLED = 240, 60  # caches and pools fill in the first steps
MAX_KIB_A_STEP = 20.0
# A run whose private memory is noted behind every step.
DRIVER = """
import json, sys
from pathlib import Path
from openrlhf.cli import train_ppo
from openrlhf.trainer.ppo_trainer import PPOTrainer

report, sizes = PPOTrainer.report, []

def report_and_note(self, *args):
    report(self, *args)
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes.append(next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))

PPOTrainer.report = report_and_note
train_ppo.main(sys.argv[1:])
print("SIZES " + json.dumps(sizes))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_memory_of_the_driver_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    root = make_inputs(tmp_path)
    flags = f"{GRPO} --init_kl_coef 0 --num_episodes {NUM_STEPS // 3} --eval_steps 20"
    held_out = ("--eval_dataset", str(root / "prompts.jsonl"))
    said = run_command("-c", DRIVER, *words(root, tmp_path / "run", flags, *held_out), timeout=800)
    [line] = [line for line in said.splitlines() if line.startswith("SIZES ")]
    sizes = json.loads(line.removeprefix("SIZES "))
    assert len(sizes) == NUM_STEPS
    assert (sizes[-1] - sizes[SETTLED]) / (NUM_STEPS - SETTLED) < MAX_KIB_A_STEP


FLAGS = "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "


# An engine that forgets the temperature.
FORGETFUL = """
import sys
from dataclasses import replace
from openrlhf.cli import train_ppo
from openrlhf.engines.vllm_engine import VLLMEngine

submit = VLLMEngine.submit

def forgetful(self, requests, *args, **options):
    plain = [replace(r, sampling=replace(r.sampling, temperature=1.0)) for r in requests]
    return submit(self, plain, *args, **options)

VLLMEngine.submit = forgetful
train_ppo.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_temperature_that_one_side_forgot_ends_the_first_step(given: dict) -> None:
    """In processes of their own: one that held vLLM and let go of it cannot hold it again."""
    flags = "--vllm_num_engines 1 --enforce_eager --temperature 0.6 --max_samples 4 "
    flags += "--rollout_batch_size 4"
    run_command("-m", "openrlhf.cli.train_ppo", *argv(FLAGS + flags, **given))
    [step] = steps_of(given["save_path"])
    assert step["vllm_kl"] < 1e-6 and step["logprobs_diff_max"] < 1e-3
    given["save_path"] = given["save_path"].with_name("forgetful")
    said = run_command("-c", FORGETFUL, *argv(FLAGS + flags, **given), code=3)
    assert "engine and trainer disagree about the sampled tokens at step 1" in said
