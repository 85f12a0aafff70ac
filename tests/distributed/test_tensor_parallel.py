"""Layers split over ranks (`--ds_tensor_parallel_size`) train to the weights of one rank:
log-probs, values, gradient norms, exports, states (beside shared rows: test_support_matrix.py).
"""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from openrlhf.config.common import DeepSpeedConfig
from openrlhf.distributed.collectives import shut_down
from openrlhf.errors import ConfigError
from openrlhf.models.support import SPLIT_STYLES, refuse_unsupported
from tests.distributed.spawn import run_ranks
from tests.helpers.split_layers import train
from tests.tiny import make_model, make_reward_model

FAMILIES = {
    "qwen2": {"num_heads": 4, "num_kv_heads": 2},  # biases
    "llama": {"num_heads": 2, "num_kv_heads": 2, "is_tied": True},
    "gemma2": {"num_heads": 4, "num_kv_heads": 4, "sliding_window": 6},  # tied, soft caps
}
STAGES = {"qwen2": (0, 2), "critic": (2,)}


def train_alone(folder: Path) -> dict:
    names = (*FAMILIES, "critic")
    found = {name: train(folder, name, {"zero_stage": 0}) for name in names}
    shut_down()
    return found


def train_split(folder: Path) -> dict:
    found = {}
    for name in (*FAMILIES, "critic"):
        for stage in STAGES.get(name, (0,)):
            found[name, stage] = train(
                folder, name, {"zero_stage": stage, "tensor_parallel_size": 2}
            )
    shut_down()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    for family, options in FAMILIES.items():
        make_model(folder / family, family, initializer_range=0.1, **options)  # type: ignore[arg-type]
    make_reward_model(folder / "reward", initializer_range=0.1, num_heads=4, num_kv_heads=2)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict:
    return run_ranks(train_alone, 1, folder)[0]  # type: ignore[return-value]


def assert_same(found: dict, expected: dict, case: object) -> None:
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5), case
    for name in ("said", "frozen"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        error = (found["weights"][name] - tensor).abs().max()
        assert error < 1e-5, f"{case}: {name} {error:.1e}"
    exports = [load_file(each["export"] / "model.safetensors") for each in (found, expected)]
    assert exports[0].keys() == exports[1].keys()
    for name in exports[0]:
        torch.testing.assert_close(exports[0][name], exports[1][name], rtol=0, atol=1e-5)


def test_two_parts_of_the_layers_are_the_whole_layers(folder: Path, alone: dict) -> None:
    for found in run_ranks(train_split, 2, folder):
        for (name, stage), each in found.items():
            assert_same(each, alone[name], (name, stage))
            assert each["numel"] < alone[name]["numel"]
            assert each["has_split_head"] == (name not in ("llama", "critic"))  # tied; a value
        assert [found["qwen2", stage]["stage"] for stage in (0, 2)] == [2, 2]  # which clips


def test_families_that_autotp_cannot_split_are_refused_by_name() -> None:
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES

    assert SPLIT_STYLES <= SUPPORTED_STYLES
    ds = DeepSpeedConfig(tensor_parallel_size=2)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    refuse_unsupported(transformers.LlamaConfig(**heads), "m", ds)
    refuse_unsupported(transformers.Qwen3Config(**heads), "m", ds)
    with_norms = (
        transformers.CohereConfig(use_qk_norm=True),
        transformers.PhiConfig(qk_layernorm=True),
    )
    for config in (transformers.BloomConfig(), transformers.MixtralConfig(), *with_norms):
        with pytest.raises(ConfigError, match=f"family {config.model_type}, which DeepSpeed's"):
            refuse_unsupported(config, "m", ds)
    one_key_head = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=1)
    with pytest.raises(ConfigError, match="has 1 heads, not a multiple"):
        refuse_unsupported(one_key_head, "m", ds)
    refuse_unsupported(one_key_head, "m", DeepSpeedConfig())
