import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from openrlhf.errors import ConfigError
from openrlhf.models.loading import (
    load_causal_lm,
    load_config,
    load_sequence_model,
    resolve_dtype,
)
from tests.models.helpers import tiny_model
from tests.tiny import Payload


@pytest.fixture(scope="module")
def causal_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("loading"), "llama")


def test_a_missing_folder_is_one_line_with_a_remedy():
    with pytest.raises(ConfigError, match=r"'/no/such/model' holds no config\.json\. Give"):
        load_causal_lm("/no/such/model")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", b'{"a":', r"cannot be read: .* Give a folder that save_pretrained wrote"),
        ("model.safetensors", None, "cannot be read: .*no file named model.safetensors"),
        ("model.safetensors", b"x" * 100, "weights of .* cannot be read: .* Copy or save them"),
    ],
)
def test_a_folder_with_a_torn_file_is_one_line(causal_dir, tmp_path, file, content, words):
    shutil.copytree(causal_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load_causal_lm(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickled_weights_load_unless_they_would_run_code(causal_dir, tmp_path, is_zip):
    folder, expected = tmp_path / "pickled", load_causal_lm(causal_dir)
    shutil.copytree(causal_dir, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save(weights, file, _use_new_zipfile_serialization=is_zip)
    assert all(map(torch.equal, load_causal_lm(folder).parameters(), expected.parameters()))
    weights["payload"] = Payload(tmp_path / "ran")
    torch.save(weights, file, _use_new_zipfile_serialization=is_zip)
    for load in (load_causal_lm, load_sequence_model):
        with pytest.raises(ConfigError, match="would run code when it is loaded: it names p") as e:
            load(folder)
        assert len(str(e.value).splitlines()) == 1 and not (tmp_path / "ran").exists()


def test_a_reward_model_is_no_policy(causal_dir, tmp_path):
    load_sequence_model(causal_dir).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"missing \(lm_head.weight\).*unexpected \(score.weight\)"
    ):
        load_causal_lm(tmp_path)


def test_auto_is_fp32_on_cpu_and_the_checkpoints_type_on_a_gpu(causal_dir):
    config = load_config(str(causal_dir))
    config.dtype = torch.bfloat16
    assert resolve_dtype("auto", config, device_type="cpu") == torch.float32
    assert resolve_dtype("auto", config, device_type="cuda") == torch.bfloat16
    assert resolve_dtype("fp16", config, device_type="cpu") == torch.float16


OTHER_MEDIA = (
    *("gemma3", "gemma3n", "llama4", "llava", "qwen3_5", "qwen3_5_moe"),
    *("chameleon", "emu3", "fuyu", "granite_speech", "moshi", "qwen2_5_omni", "qwen3_omni_moe"),
)


@pytest.mark.parametrize("family", OTHER_MEDIA)
def test_a_family_that_reads_more_than_text_is_refused_by_name(family, tmp_path):
    """transformers would load some as language models, without their towers."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ConfigError, match=rf"is of the family {family}, which reads images or"):
        load_config(str(tmp_path))
