"""The models of an RL run fit together, or one line says why not before any is loaded."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.models.loading import load_sequence_model
from openrlhf.models.value_head import RewardModel
from openrlhf.trainer.ppo_setup import check_models, check_tokens
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.vocabulary import (
    load_policy_tokenizer,
)
from openrlhf.trainer.ray.scorers import RewardModelActor
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.tokenizer import load_tokenizer
from tests.tiny import make_model, make_reward_model, make_tokenizer
from tests.trainer.test_experience import rollout

TEXTS = ("hello there<|end|>", "good")


def config_of(policy: Path, reward: Path, flags: str = "") -> PPOConfig:
    words = f"--pretrain {policy} --reward_pretrain {reward} --prompt_data d {flags}"
    return parse_config(PPOConfig, words.split()).config


@pytest.fixture(scope="module")
def reward_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("rm") / "same")


@pytest.fixture(scope="module")
def foreign_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model whose ids are others than the policy's."""
    merges = [("h", "e"), ("l", "l"), ("o", "o")]
    path = make_reward_model(tmp_path_factory.mktemp("rm") / "foreign", vocab_size=280)
    tokenizer = make_tokenizer(path, merges)
    assert len(tokenizer) > 262
    state = json.loads((path / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    a, b = "a", "b"  # two letters change places
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (path / "tokenizer.json").write_text(json.dumps(state))
    return path


def rollouts_of(policy: Path) -> list[Rollout]:
    tokenizer = load_tokenizer(str(policy))
    made = []
    for k, text in enumerate(TEXTS):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        made.append(replace(rollout(ids[:2], ids[2:], group=k), response_text=text, prompt_text=""))
    return made


def rewards_of(config: PPOConfig, path: Path, experience: Experience, folder: Path) -> list[float]:
    worker = RewardModelActor(config, "reward", str(folder))
    worker.setup()
    worker.init_model(str(path))
    return worker.compute_rewards(experience).tolist()


def scores_by_hand(path: Path, reader: Path) -> list[float]:
    """Scores of the texts as one tokenizer reads them."""
    tokenizer = load_tokenizer(str(reader))
    model = RewardModel(load_sequence_model(path, allow_fresh_head=False)).eval()
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    ids = [torch.tensor(row) for row in rows]
    batch = PackedBatch.from_sequences(ids, [torch.zeros(len(row)) for row in rows])
    with torch.no_grad():
        return model(batch).scores.tolist()


def test_a_reward_model_of_the_policys_vocabulary_reads_its_tokens(
    tiny_model_dir: Path, reward_dir: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_model_dir, reward_dir)
    assert check_tokens(config, load_policy_tokenizer(config)) == []
    experience = Experience.from_rollouts(rollouts_of(tiny_model_dir))
    found = rewards_of(config, reward_dir, experience, tmp_path)
    assert found == pytest.approx(scores_by_hand(reward_dir, tiny_model_dir), abs=1e-5)


def test_one_of_another_vocabulary_reads_the_text_as_far_as_it_has_positions(
    tiny_model_dir: Path, foreign_dir: Path, tmp_path: Path
) -> None:
    line = f"--critic_pretrain {tiny_model_dir} --micro_rollout_batch_size 1"
    config = config_of(tiny_model_dir, foreign_dir, line)
    [caution] = check_tokens(config, load_policy_tokenizer(config))
    assert f"{foreign_dir} has another vocabulary" in caution
    experience = Experience.from_rollouts(rollouts_of(tiny_model_dir))
    found = rewards_of(config, foreign_dir, experience, tmp_path)
    assert found == pytest.approx(scores_by_hand(foreign_dir, foreign_dir), abs=1e-5)
    short = shutil.copytree(foreign_dir, tmp_path / "short")
    settings = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 8}
    (short / "config.json").write_text(json.dumps(settings))
    first, second = rewards_of(config_of(tiny_model_dir, short), short, experience, tmp_path)
    assert math.isnan(first) and math.isfinite(second)


def test_a_critic_of_another_vocabulary_is_refused(tiny_model_dir: Path, foreign_dir: Path) -> None:
    config = config_of(tiny_model_dir, foreign_dir)
    with pytest.raises(ConfigError, match=f"--critic_pretrain {tiny_model_dir}"):
        check_tokens(config, load_policy_tokenizer(config))
    group = config_of(tiny_model_dir, foreign_dir, "--advantage_estimator group_norm")
    assert len(check_tokens(group, load_policy_tokenizer(group))) == 1


@pytest.mark.parametrize(
    ("num_embeddings", "is_same"), [(280, True), (262, False)], ids=["fits", "does not fit"]
)
def test_tokens_that_one_of_both_lacks_are_no_other_vocabulary_where_they_have_a_place(
    tmp_path: Path, num_embeddings: int, is_same: bool
) -> None:
    policy = make_model(tmp_path / "policy", "llama", vocab_size=280)
    make_tokenizer(policy, [("a", "b")])  # its id is 262
    reward = make_reward_model(tmp_path / "reward", architecture="llama", vocab_size=num_embeddings)
    for one, other in ((policy, reward), (reward, policy)):
        config = config_of(one, other, "--advantage_estimator group_norm")
        cautions = check_tokens(config, load_policy_tokenizer(config))
        assert (cautions == []) is (is_same or one is reward)


@pytest.mark.parametrize(
    ("flags", "change", "said"),
    [
        ("--reward_pretrain {policy}", {}, "{policy} has no value head. Give a reward model"),
        ("--normalize_reward", {"mean": None}, "mean None and std .* are unusable"),
        ("--normalize_reward", {"std": 0.0}, "std above 0"),
    ],
)
def test_a_reward_model_that_cannot_be_used_is_said_before_anything_starts(
    tiny_model_dir: Path, tmp_path: Path, flags: str, change: dict, said: str
) -> None:
    reward = make_reward_model(tmp_path / "rm")
    path = reward / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    flags = flags.format(policy=tiny_model_dir)
    named = tiny_model_dir if "reward_pretrain" in flags else reward
    rest = "" if "reward_pretrain" in flags else flags
    config = config_of(tiny_model_dir, named, rest)
    with pytest.raises(ConfigError, match=said.format(policy=tiny_model_dir)):
        check_models(config, has_engines=False)


def test_a_policy_whose_positions_change_with_length_generates_no_longer_texts(
    tmp_path: Path, reward_dir: Path
) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    path = make_model(tmp_path / "m", max_position_embeddings=64, rope_parameters=scaling)
    flags = "--advantage_estimator group_norm --prompt_max_len 14 --generate_max_len"
    check_models(config_of(path, reward_dir, f"{flags} 50"), has_engines=True)
    with pytest.raises(ConfigError, match=r"64 positions of the model"):
        check_models(config_of(path, reward_dir, f"{flags} 51"), has_engines=True)
