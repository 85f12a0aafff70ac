"""Pre-training text beside samples: every row in turn, shared by ranks, going on where it stood."""

from __future__ import annotations

import json

import pytest
import torch

from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.problems import Gathered
from openrlhf.datasets.sft_dataset import SFTDataset, SFTExample
from openrlhf.errors import DataError
from openrlhf.trainer import ppo_setup
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.replay_buffer import TextMixer, UpdateStep
from tests.tiny import make_model, make_tokenizer, write_jsonl
from tests.trainer.test_experience import THREE


class Texts:
    """Text k is k + 2 times the token k."""

    fingerprint = "five texts"

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> SFTExample:
        ids = torch.full((index + 2,), index)
        return SFTExample(ids, torch.arange(len(ids)) > 0)


def step(num_samples: int) -> UpdateStep:
    return UpdateStep(Experience.from_rollouts(THREE), 6, num_samples)


def rows_of(shares: list[list[UpdateStep]]) -> list[list[int]]:
    """The texts of every optimizer step, all ranks together."""
    return [
        sorted(int(ids[0]) for one in ranks for ids in one.texts)
        for ranks in zip(*shares, strict=True)
    ]


def test_each_step_gets_as_many_texts_as_samples_and_each_pass_every_text() -> None:
    shares = TextMixer(Texts(), seed=1).mix([[step(3), step(2), step(5)], [step(3)] * 3])
    first, second, third = rows_of(shares)
    assert (len(first), len(second), third) == (3, 2, [0, 1, 2, 3, 4])
    assert sorted(first + second) == [0, 1, 2, 3, 4]


def test_the_tokens_of_a_step_are_counted_over_all_ranks() -> None:
    shares = TextMixer(Texts(), seed=1).mix([[step(5)], [step(5)], [step(5)]])
    # Texts of 2 to 6 tokens, the first of each is given: 1 + 2 + 3 + 4 + 5.
    assert {one.num_text_tokens for [one] in shares} == {15}
    sizes = [sum(map(len, one.texts)) for [one] in shares]
    assert sum(sizes) == 20 and max(sizes) <= 7


def test_the_position_goes_on_and_other_text_begins_anew() -> None:
    straight = TextMixer(Texts(), seed=1)
    before = rows_of(straight.mix([[step(3), step(4)]]))
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = TextMixer(Texts(), seed=1)
    resumed.load_state_dict(state)
    assert rows_of(resumed.mix([[step(3)]])) == rows_of(straight.mix([[step(3)]]))
    for other in (None, state | {"fingerprint": "other"}):
        anew = TextMixer(Texts(), seed=1)
        anew.load_state_dict(other)
        assert rows_of(anew.mix([[step(3), step(4)]])) == before


def test_rows_that_repeat_an_id_are_kept_where_that_is_asked_for(tmp_path) -> None:
    path = write_jsonl(tmp_path / "texts.jsonl", [{"id": 1, "text": word} for word in "ab"])
    model = make_model(tmp_path / "model", max_position_embeddings=64)

    def texts(**data: object) -> SFTDataset:
        prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"input": "q"}])
        data = {"pretrain_dataset": str(path), "prompt_dataset": str(prompts), **data}
        actor = {"ptx_coef": 0.1, "model_name_or_path": str(model)}
        config = PPOConfig.model_validate({"data": data, "actor": actor})
        gathered = Gathered()
        *_, found = ppo_setup._data(config, make_tokenizer(tmp_path), gathered)
        gathered.raise_if_any()
        return found

    with pytest.raises(DataError, match="id"):
        texts()
    kept = texts(duplicate_ids="keep")
    assert len(kept) == 2
    write_jsonl(path, [{"text": "a"}])
    with pytest.raises(DataError, match=r"Check --pretrain_key and --max_len"):
        texts(max_len=1)
    write_jsonl(path, [{"text": "a" * 100}])
    with pytest.raises(DataError, match=r"longer than the 64 positions of the model"):
        texts(max_len=65)
