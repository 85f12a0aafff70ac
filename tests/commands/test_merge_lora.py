"""lora_combiner: the merged model answers as base and adapter together do, and loads by itself."""

import json
from collections.abc import Mapping
from pathlib import Path

import peft
import pytest
import torch
import transformers
from transformers import GenerationConfig

from openrlhf.commands.merge_lora import run_lora_combiner
from openrlhf.config.cli import parse_config
from openrlhf.config.serving import LoraCombinerConfig
from openrlhf.distributed.export import write_folder
from openrlhf.errors import ConfigError
from tests.helpers import tiny_vision
from tests.helpers.supervised_runs import weights_of
from tests.helpers.vision_samples import Samples
from tests.tiny import make_model, make_reward_model

TOKEN_IDS = torch.tensor([[10, 42, 99, 7, 130]])
TEXT = {"input_ids": TOKEN_IDS}


def combine(base: Path, adapter: Path, output: Path, *flags: str) -> None:
    words = ["--model_path", str(base), "--lora_path", str(adapter), "--output_path", str(output)]
    run_lora_combiner(parse_config(LoraCombinerConfig, [*words, *flags]).config)


def save_adapter(
    model: torch.nn.Module,
    path: Path,
    inputs: Mapping[str, torch.Tensor] = TEXT,
    **config: object,
) -> torch.Tensor:
    """Put a random adapter on a model and save it; answers the adapted model's logits."""
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], **config)
    adapted = peft.get_peft_model(model, settings).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(path)
    with torch.no_grad():
        return adapted(**inputs).logits


def test_a_merged_language_model_answers_as_the_adapted_one(tmp_path):
    base = make_model(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = model(TOKEN_IDS).logits
    adapted = save_adapter(model, tmp_path / "adapter", task_type="CAUSAL_LM")
    combine(base, tmp_path / "adapter", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(TOKEN_IDS).logits, adapted, atol=1e-5, rtol=1e-5)
    assert (adapted - before).abs().max() > 0.1
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == 1  # of the base
    own = GenerationConfig(eos_token_id=[1, 7], top_k=5, do_sample=True)
    own.save_pretrained(tmp_path / "adapter")
    combine(base, tmp_path / "adapter", tmp_path / "again")  # then that of the adapter
    found = GenerationConfig.from_pretrained(tmp_path / "again")
    assert (found.eos_token_id, found.top_k) == ([1, 7], 5)


def test_a_merged_reward_model_brings_the_head_saved_with_its_adapter(tmp_path):
    base = make_reward_model(tmp_path / "base")
    auto_class = transformers.AutoModelForSequenceClassification
    model = auto_class.from_pretrained(base)
    with torch.no_grad():
        model.score.weight.mul_(3)  # trained along
    save = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    adapted = save_adapter(model, tmp_path / "adapter", **save)
    combine(base, tmp_path / "adapter", tmp_path / "merged", "--is_rm")
    merged = auto_class.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(TOKEN_IDS).logits, adapted, atol=1e-5, rtol=1e-5)


def test_a_merged_model_reads_images_as_the_adapted_one(tmp_path):
    base = tiny_vision.make("qwen2_5_vl", tmp_path / "base")
    auto_class = transformers.AutoModelForImageTextToText
    inputs = Samples(str(base)).inputs(0)  # two images
    model = auto_class.from_pretrained(base)
    before = model(**inputs).logits
    adapted = save_adapter(model, tmp_path / "adapter", inputs, task_type="CAUSAL_LM")
    combine(base, tmp_path / "adapter", tmp_path / "merged")
    merged, info = auto_class.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(merged(**inputs).logits, adapted, atol=1e-5, rtol=1e-5)
    assert (adapted - before).abs().max() > 0.1
    assert weights_of(tmp_path / "merged").keys() == weights_of(base).keys()
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / "merged" / name).read_text() == (base / name).read_text()


def test_an_adapter_on_an_adapter_is_merged_into_that_one_only(tmp_path, caplog):
    base = make_model(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    save_adapter(model, tmp_path / "sft", task_type="CAUSAL_LM")
    combine(base, tmp_path / "sft", tmp_path / "merged")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = save_adapter(model, tmp_path / "dpo", task_type="CAUSAL_LM")
    config = json.loads((tmp_path / "dpo" / "adapter_config.json").read_text())
    named = config | {"base_model_name_or_path": str(tmp_path / "sft")}
    (tmp_path / "dpo" / "adapter_config.json").write_text(json.dumps(named))
    with pytest.raises(ConfigError, match="is an adapter itself and would be left out"):
        combine(base, tmp_path / "dpo", tmp_path / "out")
    combine(tmp_path / "sft", tmp_path / "dpo", tmp_path / "out")
    assert "which PEFT and vLLM would leave out" not in caplog.text
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    twice = peft.PeftModel.from_pretrained(plain, tmp_path / "dpo")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    write_folder(twice, twice.state_dict(), tokenizer, tmp_path / "again")
    assert f"{tmp_path / 'sft'}, an adapter itself, which PEFT and vLLM would leave" in caplog.text
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(merged(TOKEN_IDS).logits, expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_that_names_no_base_is_exported_and_merged(tmp_path):
    base = make_model(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model.name_or_path = ""  # made in memory
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    write_folder(adapted, adapted.state_dict(), tokenizer, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert not config["base_model_name_or_path"]
    combine(base, tmp_path / "adapter", tmp_path / "merged")
    assert weights_of(tmp_path / "merged").keys() == weights_of(base).keys()
    ends = GenerationConfig.from_pretrained(base).eos_token_id
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == ends


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    base = make_model(tmp_path / "base")
    with pytest.raises(ConfigError, match="Can't find 'adapter_config"):
        combine(base, tmp_path, tmp_path / "merged")
