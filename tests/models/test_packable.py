"""Families that cannot be trained packed are told by name, without a weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from openrlhf.errors import ConfigError
from openrlhf.models.packable import check_family
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
SAID = "has an attention of its own, which is not known to keep packed sequences apart"


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_one_that_attends_in_its_own_way_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=SAID):
        check_family(OWN_ATTENTION[family], "m")


def test_layers_with_a_state_are_refused() -> None:
    with pytest.raises(ConfigError, match="m: MambaForCausalLM has recurrent layers"):
        check_family(transformers.MambaConfig(), "m")
    with pytest.raises(ConfigError, match="m: Qwen3NextForCausalLM has linear_attention"):
        check_family(transformers.Qwen3NextConfig(), "m")


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Mixtral"])
def test_others_pass(family: str) -> None:
    check_family(getattr(transformers, f"{family}Config")(), "m")


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
    [line] = [line for line in error.splitlines() if SAID in line]
    assert f"{tmp_path}/model: " in line and "Traceback" not in error


@pytest.mark.parametrize(
    ("command", "flags"),
    [("kd", "--teacher_model {other}"), ("dpo", "--ref_pretrain {other} --prompt_key input")],
)
def test_so_is_another_model_before_a_row_is_read(
    command: str, flags: str, tiny_model_dir: Path, tmp_path: Path, refuse: Callable
) -> None:
    OWN_ATTENTION["bloom"].save_pretrained(tmp_path / "other")
    (tmp_path / "rows.jsonl").write_text("no rows\n")
    words = f"--pretrain {tiny_model_dir} --dataset {tmp_path}/rows.jsonl {flags}"
    code, error = refuse(f"train_{command}", words.format(other=tmp_path / "other").split())
    assert code == 2, error
    assert f"{tmp_path}/other: BloomForCausalLM {SAID}" in error
