"""Layers split over ranks (`--ds_tensor_parallel_size`) train to the weights of one rank:
log-probs, values, gradient norms, exports, states (beside shared rows: test_support_matrix.py).
"""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.collectives import shut_down
from openrlhf.distributed.export import export_hf
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import stored_parameters
from openrlhf.errors import ConfigError
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm, load_sequence_model
from openrlhf.models.support import SPLIT_STYLES, refuse_unsupported
from openrlhf.models.value_head import CriticModel
from tests.distributed.spawn import run_ranks
from tests.models.helpers import full_batch, random_sequences
from tests.tiny import make_model, make_reward_model

FAMILIES = {
    "qwen2": {"num_heads": 4, "num_kv_heads": 2},  # biases
    "llama": {"num_heads": 2, "num_kv_heads": 2, "is_tied": True},
    "gemma2": {"num_heads": 4, "num_kv_heads": 4, "sliding_window": 6},  # tied, soft caps
}
# An epsilon above what rounding makes of a gradient of zero: Adam would take it for a direction.
OPTIM = OptimizerConfig(
    adam=AdamConfig(lr=1e-3, weight_decay=0.1, eps=1e-5), max_norm=0.5, lr_scheduler="constant"
)
STAGES = {"qwen2": (0, 2), "critic": (2,)}
SEQUENCES = random_sequences((7, 30, 2, 11, 5, 9, 13, 4))


def load(folder: Path, name: str) -> nn.Module:
    if name == "critic":
        return CriticModel(load_sequence_model(folder / "reward"))
    return Actor(load_causal_lm(folder / name))


def loss_of(engine: object, name: str, part: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The part of these sequences in the loss of all, and the numbers it is made of."""
    batch = full_batch(part).to(engine.device)  # type: ignore[attr-defined]
    values = engine(batch) if name == "critic" else engine(batch, temperature=0.7).logprobs
    return values.float().square().sum() / 80, values.detach()


def train(folder: Path, name: str, options: dict) -> dict:
    """Three steps of a model, and what it says after them."""
    strategy = DeepSpeedStrategy(DeepSpeedConfig(**options), seed=1)
    strategy.setup()
    frozen = strategy.prepare_eval(load(folder, name))
    model = load(folder, name)
    engine = strategy.prepare_train(model, OPTIM, num_updates=4)
    norms = []
    for _ in range(3):
        own = strategy.topology.shard(SEQUENCES)
        engine.backward(loss_of(engine, name, own)[0], is_last_micro_batch=True)
        norms.append(engine.step())
    with torch.no_grad():
        said = loss_of(engine, name, SEQUENCES)[1]
    where = "-".join(map(str, (strategy.topology.world_size, name, *options.values())))
    tokenizer = AutoTokenizer.from_pretrained(folder / ("reward" if name == "critic" else name))
    export_hf(model.model, tokenizer, folder / where)
    weights = {n: t.clone() for n, t in stored_parameters(engine.module)}
    engine.save_states(folder / f"{where}-states")
    engine.backward(loss_of(engine, name, SEQUENCES[:1])[0], is_last_micro_batch=True)
    engine.step()
    engine.load_states(folder / f"{where}-states")
    assert all(torch.equal(t, weights[n]) for n, t in stored_parameters(engine.module))
    return {
        "norms": norms,
        "said": said,
        "frozen": loss_of(frozen, name, SEQUENCES)[1],
        "weights": weights,
        "has_split_head": getattr(getattr(model, "head", None), "shard", None) is not None,
        "numel": sum(p.numel() for p in engine.module.parameters()),
        "export": folder / where,
        "stage": engine.zero_stage,
    }


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
