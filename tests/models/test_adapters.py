"""Adapters: what they train, and their folder, which stands for the base with it merged."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from openrlhf.config.common import DeepSpeedConfig, LoraConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.distributed.export import export_hf
from openrlhf.distributed.weights import full_parameters, stored_parameters
from openrlhf.errors import ConfigError, Gathered
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import add_lora, is_adapted, load_adapter
from openrlhf.models.loading import (
    is_value_model,
    load_causal_lm,
    load_config,
    load_sequence_model,
    read_configs,
)
from openrlhf.models.value_head import RewardModel
from openrlhf.utils.adapter_folder import base_of_adapter, refuse_adapter
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tokenizer import load_tokenizer
from tests.helpers import tiny_vision
from tests.tiny import Payload, make_model

LORA = LoraConfig(rank=4, alpha=8)


@pytest.fixture
def batch() -> PackedBatch:
    ids = torch.arange(20, 40)
    masks = [torch.arange(12) > 0, torch.arange(8) > 0]
    return PackedBatch.from_sequences([ids[:12], ids[12:]], masks)


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(std=0.1, generator=generator)


@pytest.fixture
def policy(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A policy's adapter."""
    adapted = add_lora(load_causal_lm(tiny_model_dir), LORA)
    randomise(adapted)
    adapted.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def test_an_adapter_on_an_adapter_names_the_folder_below_and_loads_with_it(
    policy: Path, tmp_path: Path, batch: PackedBatch
) -> None:
    second = add_lora(load_causal_lm(policy), LORA)
    randomise(second, seed=1)
    second.save_pretrained(tmp_path / "second")
    assert base_of_adapter(tmp_path / "second") == str(policy)
    model = load_causal_lm(tmp_path / "second")
    assert not is_adapted(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    found, expected = (Actor(each)(batch).logprobs for each in (model, second))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", ["score", "value_head"])
def test_a_reward_adapter_brings_its_head_and_scale(
    tiny_model_dir: Path, tmp_path: Path, batch: PackedBatch, head: str
) -> None:
    adapted = add_lora(load_sequence_model(tiny_model_dir, value_head_prefix=head), LORA)
    randomise(adapted)
    adapted.save_pretrained(tmp_path)
    config = adapted.get_base_model().config
    config.update({"mean": 0.5, "std": 2.0})  # as openrlhf rm leaves them
    config.save_pretrained(tmp_path)
    assert is_value_model(load_config(str(tmp_path)))
    loaded = load_sequence_model(tmp_path, allow_fresh_head=False)
    model = RewardModel(loaded, normalize_reward=True)
    expected = (RewardModel(adapted)(batch).scores - 0.5) / 2.0
    torch.testing.assert_close(model(batch).scores, expected, atol=1e-5, rtol=1e-5)


def test_what_is_trained_on_an_adapter_is_exported_with_the_image_processor_of_its_base(
    tmp_path: Path,
) -> None:
    base = tiny_vision.make("qwen2_5_vl", tmp_path / "base")
    add_lora(load_causal_lm(base), LORA).save_pretrained(tmp_path / "adapter")  # as PEFT does
    model = load_causal_lm(tmp_path / "adapter")
    export_hf(model, load_tokenizer(str(base)), tmp_path / "out")
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / "out" / name).read_text() == (base / name).read_text()


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    edit(weights)
    save_file(weights, folder / "adapter_model.safetensors")


def test_an_adapter_that_lacks_a_weight_or_has_one_too_many_is_refused(
    policy: Path,
) -> None:
    name, ones = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight", torch.ones(128, 4)
    edit_weights(policy, lambda weights: weights.pop(name))
    with pytest.raises(ConfigError, match=re.escape(f"1 are missing ({name}")):
        load_causal_lm(policy)
    more = name.replace("layers.1", "layers.7")
    edit_weights(policy, lambda weights: weights.update({name: ones, more: ones + 1}))
    with pytest.raises(ConfigError, match=re.escape(f"1 are unexpected ({more}")):
        load_causal_lm(policy)


def test_a_pickled_adapter_loads_unless_it_would_run_code(
    policy: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(policy)
    expected = load_causal_lm(policy).state_dict()
    weights = load_file(policy / "adapter_model.safetensors")
    (policy / "adapter_model.safetensors").unlink()
    torch.save(weights, policy / "adapter_model.bin")
    found = load_causal_lm(policy).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    torch.save(weights | {"payload": Payload(policy / "ran")}, policy / "adapter_model.bin")
    for load in (load_causal_lm, lambda path: load_adapter(load_causal_lm(tiny_model_dir), path)):
        with pytest.raises(ConfigError, match="would run code when it is loaded: it names posix"):
            load(policy)
    assert not (policy / "ran").exists()


def set_base(folder: Path, base: str | None) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": base}))


def test_an_adapter_without_its_base_is_one_line_with_a_remedy(
    policy: Path,
) -> None:
    set_base(policy, "/no/such/base")
    with pytest.raises(ConfigError, match=r"lacks its base\. Model path '/no/such/base' holds"):
        load_config(str(policy))
    set_base(policy, None)
    with pytest.raises(ConfigError, match="openrlhf merge-lora --model_path BASE --lora_path"):
        load_config(str(policy))


def test_an_engine_that_reads_files_refuses_an_adapter(policy: Path, tiny_model_dir: Path) -> None:
    line = f"--pretrain {policy} .* merge-lora --model_path {tiny_model_dir} --lora_path"
    with pytest.raises(ConfigError, match=line):
        refuse_adapter(policy, "--pretrain")
    refuse_adapter(tiny_model_dir, "--pretrain")


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
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


ON_EMBEDDINGS: list[dict[str, object]] = [
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    {"target_modules": ["q_proj"], "trainable_token_indices": [20, 21]},
]


@pytest.mark.parametrize("settings", ON_EMBEDDINGS)
def test_an_adapter_on_tied_embeddings_keeps_its_loss_when_merged_and_exported(
    tiny_tied_model_dir: Path, tmp_path: Path, batch: PackedBatch, settings: dict[str, object]
) -> None:
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **settings)
    adapted = peft.get_peft_model(load_causal_lm(tiny_tied_model_dir), config)
    randomise(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = load_causal_lm(tmp_path / "adapter")
    export_hf(merged, load_tokenizer(str(tiny_tied_model_dir)), tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = batch.token_ids[None]
    losses = [model(input_ids=ids, labels=ids).loss for model in (adapted, merged, exported)]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-5)
    assert losses[0].item() == pytest.approx(losses[2].item(), abs=1e-5)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_tied_embeddings_are_refused_as_target_before_weights_are_read(
    tiny_tied_model_dir: Path, name: str
) -> None:
    path, gathered = str(tiny_tied_model_dir), Gathered()
    lora = LoraConfig(rank=4, target_modules=("q_proj", name))
    command = SFTConfig(ds=DeepSpeedConfig(lora=lora))
    read_configs([path], command, gathered, has_router_loss=False)
    assert f"--target_modules q_proj {name}: embeddings and LM head of" in gathered.problems[0]


def test_an_adapter_on_untied_embeddings_reaches_an_engine_merged(
    tiny_model_dir: Path, batch: PackedBatch
) -> None:
    lora = LoraConfig(rank=4, target_modules=("q_proj", "embed_tokens"))
    adapted = add_lora(load_causal_lm(tiny_model_dir), lora)
    randomise(adapted)
    engine = load_causal_lm(tiny_model_dir)
    engine.load_state_dict(dict(stored_parameters(adapted)))
    found, expected = (Actor(model)(batch).logprobs for model in (engine, adapted))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_with_a_bias_where_the_base_has_none_is_refused_in_one_line(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = peft.LoraConfig(r=4, target_modules=["o_proj"], lora_bias=True)
    peft.get_peft_model(load_causal_lm(tiny_model_dir), config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be merged: .*lora_bias"):
        load_causal_lm(tmp_path)


def test_unknown_target_modules_are_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"--target_modules query: Target modules .* not found"):
        add_lora(load_causal_lm(tiny_model_dir), LoraConfig(rank=4, target_modules=("query",)))
    names = ("[q_proj", "k_proj", "v_proj]")  # pasted from Python: PEFT takes the middle one alone
    with pytest.raises(ConfigError, match=r"has no layer \[q_proj, v_proj\] that takes an adapter"):
        add_lora(load_causal_lm(tiny_model_dir), LoraConfig(rank=4, target_modules=names))


@pytest.mark.parametrize("kind", ["qwen3_next", "mixtral"])
def test_adapters_of_experts_and_routers_are_merged_where_weights_leave_the_trainer(
    kind: str, tmp_path: Path
) -> None:
    path = make_model(tmp_path, kind)
    bare = AutoModelForCausalLM.from_pretrained(path)
    adapted = add_lora(AutoModelForCausalLM.from_pretrained(path), LORA).eval()
    randomise(adapted)
    merged = dict(full_parameters(adapted))
    assert {*bare.state_dict()} - {"lm_head.weight"} <= merged.keys()
    token_ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        expected, before = adapted(token_ids).logits, bare(token_ids).logits
        bare.load_state_dict(merged)
        assert (bare(token_ids).logits - expected).abs().max() < 1e-5
    assert (before - expected).abs().max() > 1e-3
    in_files = dict(stored_parameters(adapted))  # experts one by one, where files have them so
    assert sum(t.numel() for t in in_files.values()) == sum(t.numel() for t in merged.values())


def test_a_merged_weight_is_rounded_once(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    adapted = add_lora(model, LORA)
    randomise(adapted)
    layer = adapted.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    merged = dict(full_parameters(adapted))["model.layers.0.self_attn.q_proj.weight"]
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default").float()
    assert torch.equal(merged, exact.bfloat16())
