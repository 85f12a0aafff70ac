"""Settings of RL whose effect shows only in a whole run, on the Hugging Face engine."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest
import torch
import transformers
from safetensors.torch import load_file

from openrlhf.algorithms.kl import adaptive_kl_coef
from tests.integration.ppo_runs import GRPO, PPO, make_inputs, start, steps_of


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("ppo_knobs"))


@pytest.fixture(scope="module")
def ppo(root: Path) -> Path:
    """Three steps of PPO; the policy is frozen in the first."""
    flags = (
        f"{PPO} --init_kl_coef 0.05 --kl_target 0.01 --kl_horizon 50 --max_epochs 2 "
        "--freezing_actor_steps 1 --save_value_network --critic_pretrain {root}/reward_model "
        "--lr_scheduler constant --reward_clip_range -10 10 "
        "--overlong_buffer_len 4 --overlong_penalty_factor 3"
    )
    assert start(root, root / "ppo", flags) == 0
    return root / "ppo"


def test_the_first_steps_train_the_critic_alone(ppo: Path) -> None:
    steps = steps_of(ppo)
    assert ["policy_loss" in step for step in steps] == [False, True, True]
    assert all("critic_loss" in step for step in steps)
    versions = [
        pandas.read_parquet(ppo / "rollouts" / f"step_{step:06d}.parquet").weight_version.unique()
        for step in (1, 2, 3)
    ]
    # The second step still samples from the policy as it was at the start.
    assert [list(found) for found in versions] == [[0], [0], [1]]


def test_the_kl_coefficient_follows_the_measured_kl(ppo: Path) -> None:
    coef = 0.05
    for step, num_samples in zip(steps_of(ppo), (8, 8, 6), strict=True):
        coef = adaptive_kl_coef(coef, step["kl"], target=0.01, horizon=50, num_samples=num_samples)
        assert step["kl_coef"] == pytest.approx(coef, rel=1e-9)
    assert coef != pytest.approx(0.05, rel=1e-3)


def test_the_exported_critic_is_a_value_model_that_has_learned(ppo: Path, root: Path) -> None:
    critic = Path(f"{ppo}_critic")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(critic)
    before = load_file(root / "reward_model" / "model.safetensors")
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert not torch.equal(before["score.weight"], after["score.weight"])


def expected_returns(run_dir: Path, shape) -> list[float]:
    """The mean return of every step where the reward comes with the last token alone."""
    returns = []
    for step in range(1, 4):
        rows = pandas.read_parquet(run_dir / "rollouts" / f"step_{step:06d}.parquet")
        returns.append(sum(shape(row) for row in rows.itertuples()) / len(rows))
    return returns


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        (
            "--overlong_buffer_len 4 --overlong_penalty_factor 3",
            # Excess over 8 - 4 tokens, as a part of 4.
            lambda row: row.reward - 3 * max(0, row.num_actions - 4) / 4,
        ),
        (
            "--reward.stop_properly_penalty_coef 0.25",
            lambda row: row.reward * (0.25 if row.finish_reason == "length" else 1.0),
        ),
        (
            "--reward.stop_properly_penalty_coef -2",
            lambda row: -2.0 if row.finish_reason == "length" else row.reward,
        ),
    ],
)
def test_length_penalties_change_the_return_and_not_the_logged_reward(
    root: Path, tmp_path: Path, flags: str, shape
) -> None:
    assert start(root, tmp_path / "run", f"{PPO} --init_kl_coef 0 --lambd 1 {flags}") == 0
    steps = steps_of(tmp_path / "run")
    found = [step["return"] for step in steps]
    assert found == pytest.approx(expected_returns(tmp_path / "run", shape), abs=1e-5)
    raw = expected_returns(tmp_path / "run", lambda row: row.reward)
    assert [step["reward"] for step in steps] == pytest.approx(raw, abs=1e-5)
    assert all(abs(a - b) > 1e-3 for a, b in zip(found, raw, strict=True))


def language_loss(model_dir: Path, text: str) -> float:
    """Mean -log p of a text's tokens but the first."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def test_mixed_in_text_keeps_the_language_loss_low(root: Path) -> None:
    text = "the quick brown fox jumps over it "
    flags = f"{GRPO} --init_kl_coef 0 --num_episodes 2"
    mixed = flags + " --pretrain_data {root}/texts.jsonl --ptx_coef 0.5"
    assert start(root, root / "plain", flags) == 0
    assert start(root, root / "mixed", mixed) == 0
    before, plain, with_text = (
        language_loss(root / name, text) for name in ("model", "plain", "mixed")
    )
    assert plain > before - 0.3
    assert with_text < before - 1.0
    losses = [step["ptx_loss"] for step in steps_of(root / "mixed")]
    assert losses[-1] < losses[0] - 1.0
    assert "ptx_loss" not in steps_of(root / "plain")[0]
