"""Adapters: what they train, that a head goes with them, and that merging changes no answer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from openrlhf.config.common import LoraConfig
from openrlhf.errors import ConfigError
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import adapters_disabled, add_lora, load_adapter
from openrlhf.models.loading import load_causal_lm, load_sequence_model, merge_adapter
from openrlhf.models.value_head import RewardModel
from openrlhf.utils.packing import PackedBatch
from tests.tiny import make_model

LORA = LoraConfig(rank=4, alpha=8)
FAMILIES = ("qwen3", "gemma")


@pytest.fixture
def batch() -> PackedBatch:
    token_ids = [torch.arange(10, 22), torch.arange(40, 45)]
    masks = [torch.ones(len(ids), dtype=torch.bool) for ids in token_ids]
    for mask in masks:
        mask[0] = False
    return PackedBatch.from_sequences(token_ids, masks)


def randomise(model: torch.nn.Module) -> None:
    """Give an adapter an effect: PEFT starts with B = 0."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_adapter_is_trained_and_a_fresh_one_changes_nothing(
    tmp_path: Path, batch: PackedBatch, family: str
) -> None:
    path = make_model(tmp_path, family)
    base = Actor(load_causal_lm(path))(batch).logprobs
    actor = Actor(add_lora(load_causal_lm(path), LORA))
    assert torch.equal(actor(batch).logprobs, base)
    actor(batch).logprobs.sum().backward()
    trained = {name for name, p in actor.named_parameters() if p.grad is not None}
    assert trained and all("lora_" in name for name in trained)
    assert len([name for name in trained if "lora_A" in name]) == 2 * 7  # layers x linear layers


def test_an_adapter_that_is_switched_off_leaves_the_base(
    tiny_model_dir: Path, batch: PackedBatch
) -> None:
    base = Actor(load_causal_lm(tiny_model_dir))(batch).logprobs
    actor = Actor(add_lora(load_causal_lm(tiny_model_dir), LORA))
    randomise(actor)
    assert (actor(batch).logprobs - base).abs().max() > 1e-3
    with adapters_disabled(actor.model):
        assert torch.equal(actor(batch).logprobs, base)


def test_unknown_target_modules_are_refused_with_those_there_are(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--target_modules query: down_proj, gate_proj, k_proj"):
        add_lora(load_causal_lm(tiny_model_dir), LoraConfig(rank=4, target_modules=("query",)))


def test_a_merged_policy_answers_as_the_adapted_one(
    tiny_model_dir: Path, tmp_path: Path, batch: PackedBatch
) -> None:
    adapted = add_lora(load_causal_lm(tiny_model_dir), LORA)
    randomise(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = merge_adapter(str(tiny_model_dir), str(tmp_path / "adapter"))
    merged.save_pretrained(tmp_path / "merged")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(info.values())
    expected = Actor(adapted)(batch).logprobs
    ids = batch.token_ids[:12]
    logprobs = loaded(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected[:11], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_name", ["score", "value_head"])
def test_the_head_of_a_reward_model_goes_with_its_adapter(
    tiny_model_dir: Path, tmp_path: Path, batch: PackedBatch, head_name: str
) -> None:
    base = partial(load_sequence_model, tiny_model_dir, value_head_prefix=head_name)
    adapted = add_lora(base(), LORA)
    randomise(adapted)
    model = RewardModel(adapted)
    model(batch).sum().backward()
    head = adapted.get_base_model().get_submodule(head_name).modules_to_save["default"].weight
    assert head.grad is not None
    head.data.normal_(generator=torch.Generator().manual_seed(1))
    expected = model(batch)
    adapted.save_pretrained(tmp_path / "adapter")
    again = load_adapter(base(), tmp_path / "adapter")
    torch.testing.assert_close(RewardModel(again)(batch), expected)
    adapted.get_base_model().config.update({"mean": 0.5, "std": 2.0})
    adapted.get_base_model().config.save_pretrained(tmp_path / "adapter")
    merged = merge_adapter(str(tiny_model_dir), str(tmp_path / "adapter"), is_rm=True)
    merged.save_pretrained(tmp_path / "merged")
    if head_name == "score":
        auto_class = transformers.AutoModelForSequenceClassification
        loaded, info = auto_class.from_pretrained(tmp_path / "merged", output_loading_info=True)
        assert not any(info.values())
    else:
        loaded = load_sequence_model(tmp_path / "merged", allow_fresh_head=False)
    assert (loaded.config.mean, loaded.config.std) == (0.5, 2.0)
    torch.testing.assert_close(RewardModel(loaded)(batch), expected, atol=1e-5, rtol=1e-5)
