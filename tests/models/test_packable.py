"""Families that cannot be trained packed are told by name, without a weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from openrlhf.errors import ConfigError
from openrlhf.models.packable import check_family, check_packable
from tests.tiny import make_tokenizer, write_jsonl

SIZES = {"vocab_size": 262, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
OWN_ATTENTION = {
    "bloom": transformers.BloomConfig(vocab_size=262, hidden_size=32, n_layer=2, n_head=2),
    "falcon": transformers.FalconConfig(**SIZES),
    "gptj": transformers.GPTJConfig(vocab_size=262, n_embd=32, n_layer=2, n_head=2),
    "gpt_neo": transformers.GPTNeoConfig(
        vocab_size=262, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global"], 2]]
    ),
    "mpt": transformers.MptConfig(vocab_size=262, d_model=32, n_layers=2, n_heads=2),
}
SAID = "does not use transformers' attention interface: it cannot be trained packed"


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_one_that_attends_in_its_own_way_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=SAID):
        check_family(OWN_ATTENTION[family])


@pytest.mark.parametrize("family", ["gptj", "gpt_neo"])
def test_it_is_refused_under_flash_attention_too(family: str) -> None:
    # transformers takes it there, without the boundaries of the sequences.
    config = OWN_ATTENTION[family]
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ConfigError, match=SAID):
        check_packable(type(model), model.config)


def test_layers_with_a_state_are_refused() -> None:
    with pytest.raises(ConfigError, match="MambaForCausalLM has recurrent layers"):
        check_family(transformers.MambaConfig())
    with pytest.raises(ConfigError, match="Qwen3NextForCausalLM has linear_attention"):
        check_family(transformers.Qwen3NextConfig())


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Mixtral"])
def test_others_pass(family: str) -> None:
    check_family(getattr(transformers, f"{family}Config")())


COMMANDS = {
    "sft": "--input_key input --output_key output",
    "kto": "--input_key input --output_key output",
    "ppo": "--prompt_data {data} --input_key input --reward_pretrain {model} "
    "--critic_pretrain {model}",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_commands_say_so_before_they_read_weights(
    family: str, command: str, tmp_path: Path, refuse: Callable
) -> None:
    make_tokenizer(tmp_path / "model")
    OWN_ATTENTION[family].save_pretrained(tmp_path / "model")
    data = write_jsonl(tmp_path / "rows.jsonl", [{"input": "q", "output": "a", "label": 1}])
    flags = COMMANDS[command].format(data=data, model=tmp_path / "model").split()
    source = ["--dataset", str(data)] if command != "ppo" else []
    words = ["--pretrain", str(tmp_path / "model"), "--save_path", str(tmp_path / "run")]
    code, error = refuse(f"train_{command}", [*words, *source, *flags])
    assert code == 2, error
    assert any(SAID in line for line in error.splitlines()) and "Traceback" not in error
