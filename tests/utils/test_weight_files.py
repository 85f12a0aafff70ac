"""What the heads of weight files give away before a model is built."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openrlhf.errors import ConfigError
from openrlhf.models.loading import DEFAULTS, check_files, load_causal_lm, load_config
from openrlhf.utils.tokenizer import load_tokenizer
from tests.tiny import write_jsonl

WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def edit(model: Path, **values: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | values))


def edit_weights(model: Path, name: str, tensor: torch.Tensor) -> None:
    weights = load_file(model / "model.safetensors")
    save_file(weights | {name: tensor}, model / "model.safetensors", {"format": "pt"})


def refusal(model: Path, refuse) -> str:
    rows = write_jsonl(model.parent / "rows.jsonl", [{"input": "q", "output": "a"}])
    words = (
        f"--pretrain {model} --dataset {rows} --output_key output --save_path {model.parent}/run"
    )
    code, error = refuse("train_sft", words.split())
    assert code == 2 and len(error.splitlines()) == 1, error
    return error


def test_more_layers_than_tensors_are_refused_and_not_built(model: Path, refuse) -> None:
    edit(model, num_hidden_layers=10**9, layer_types=None)
    assert "num_hidden_layers 1,000,000,000, and the files hold 27 tensors" in refusal(
        model, refuse
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", -1, "makes no model: RuntimeError: Trying to create tensor with negative"),
        ("num_attention_heads", 0, "makes no model: ZeroDivisionError: integer division"),
        ("hidden_act", "nope", "makes no model: KeyError: 'nope'. Copy the model again."),
    ],
)
def test_a_config_that_makes_no_model_is_refused(
    model: Path, refuse, field: str, value: object, message: str
) -> None:
    edit(model, **{field: value})
    assert message in refusal(model, refuse)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("hidden_size", "64", "field 'hidden_size': .*expected int, got str"),
        ("num_hidden_layers", -1, r"`num_hidden_layers` \(-1\) must be equal"),
    ],
)
def test_a_config_that_cannot_be_read_is_named_with_its_reason_by_model_and_tokenizer(
    model: Path, field: str, value: object, reason: str
) -> None:
    edit(model, **{field: value})
    for load in (load_config, load_tokenizer):
        with pytest.raises(ConfigError, match=reason) as caught:
            load(str(model))
        assert "tokenizer files" not in str(caught.value)


def test_an_index_that_leads_out_of_the_folder_is_refused(model: Path, refuse) -> None:
    weights = load_file(model / "model.safetensors")
    shutil.move(model / "model.safetensors", model.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "../outside.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names a file outside of its folder: ../outside.safetensors" in refusal(model, refuse)


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_the_index_of_an_adapters_base_does_not_lead_out_either(
    model: Path, refuse, index: str
) -> None:
    (model / "model.safetensors").unlink()
    (model / index).write_text(json.dumps({"weight_map": {WEIGHT: "../outside"}}))
    adapter = model.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(model)})
    )
    for folder in (model, adapter):
        assert f"{index} names a file outside of its folder: ../outside" in refusal(folder, refuse)


def test_an_adapter_that_is_its_own_base_is_one_line(tmp_path: Path, refuse) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(adapter)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert f"{adapter} holds an adapter that is its own base." in refusal(adapter, refuse)


@pytest.mark.parametrize("names", [{"x": 5}, {"x": None}, {"x": "a", "y": 1}, ["a.safetensors"]])
def test_an_index_that_names_no_files_is_one_line(model: Path, refuse, names: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "index.json does not name a file for each weight. Copy" in refusal(model, refuse)


@pytest.mark.parametrize("head", [[], ["x"], {"x": "y"}, {"x": {}}, {"x": {"data_offsets": [0]}}])
def test_a_head_of_another_form_is_one_line(model: Path, refuse, head: object) -> None:
    said = json.dumps(head).encode()
    (model / "model.safetensors").write_bytes(len(said).to_bytes(8, "little") + said)
    assert "has no head that can be read" in refusal(model, refuse)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda whole: whole[:-100], "bytes of "),
        (lambda whole: whole[:50], "has no head that can be read. Copy the model again."),
        (lambda whole: b"", "has no head that can be read. Copy the model again."),
        (
            lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n",
            "is a pointer of Git LFS, not weights. Type git lfs pull in its folder.",
        ),
    ],
)
def test_a_torn_file_is_found_before_a_model_is_loaded(
    model: Path, refuse, content, message: str
) -> None:
    file = model / "model.safetensors"
    file.write_bytes(content(file.read_bytes()))
    error = refusal(model, refuse)
    assert f"--pretrain {file}" in error and message in error


def test_a_file_that_the_index_names_and_that_is_missing_is_found(model: Path, refuse) -> None:
    weights = load_file(model / "model.safetensors")
    names = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(weights)}
    (model / "model.safetensors").rename(model / "model-1-of-2.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "index.json names model-2-of-2.safetensors, which is missing." in refusal(model, refuse)


def test_a_tensor_of_another_shape_is_named_before_it_is_read(model: Path, refuse) -> None:
    edit_weights(model, WEIGHT, torch.zeros(126, 64))
    assert f"{WEIGHT} has the shape [126, 64], and by config.json [128, 64]" in refusal(
        model, refuse
    )


def test_a_tensor_of_another_shape_is_one_line_where_it_is_read(model: Path) -> None:
    edit_weights(model, WEIGHT, torch.zeros(126, 64))
    with pytest.raises(ConfigError, match=rf"1 keys are of another shape \({WEIGHT}\)"):
        load_causal_lm(model)


def test_a_folder_with_two_sets_of_weights_is_refused(model: Path, refuse) -> None:
    shutil.copy(model / "model.safetensors", model / "new.safetensors")
    write_index(model, "new.safetensors")
    assert "two sets of weights: model.safetensors, and the files that" in refusal(model, refuse)


def test_an_index_may_name_the_one_file(model: Path) -> None:
    write_index(model, "model.safetensors")
    load_causal_lm(model)
    look(model)


def write_index(model: Path, file: str) -> None:
    names = dict.fromkeys(load_file(model / "model.safetensors"), file)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))


def look(model: Path) -> None:
    """Look at the files that an engine will read."""
    check_files(load_config(str(model)), str(model), DEFAULTS)


def test_a_weight_that_is_missing_is_named_before_an_engine_does_without(model: Path) -> None:
    edit_weights(model, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))  # not read
    look(model)
    weights = load_file(model / "model.safetensors")
    del weights[WEIGHT]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"1 are missing, such as {WEIGHT}"):
        look(model)


def test_a_constant_of_masks_is_no_weight(model: Path) -> None:
    edit_weights(model, "model.layers.0.masked_bias", torch.tensor(-torch.inf))
    look(model)


def test_weights_that_are_no_numbers_are_named(model: Path) -> None:
    edit_weights(model, WEIGHT, torch.full((128, 64), torch.nan))
    for read in (load_causal_lm, look):  # by the trainer, and before an engine does
        with pytest.raises(ConfigError, match=rf"hold NaN or infinity \({WEIGHT}\)"):
            read(model)
