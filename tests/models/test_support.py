"""What a machine lacks, what a model cannot be used with, the longest sequence that it reads."""

from pathlib import Path

import pytest
import torch
import transformers as hf

from openrlhf.cli import train_kto
from openrlhf.config.common import DeepSpeedConfig
from openrlhf.errors import ConfigError
from openrlhf.models import support
from openrlhf.models.support import (
    check_engine_split,
    check_here,
    most_workers,
    num_positions,
    refuse_unsupported,
)
from tests.tiny import make_model, write_jsonl


def missing(**settings: object) -> list[str]:
    """What a machine without a GPU lacks for these settings."""
    try:
        check_here(DeepSpeedConfig(**settings), is_cuda=False)
    except ConfigError as error:
        return error.problems
    return []


def test_everything_a_machine_lacks_is_said_at_once(monkeypatch):
    monkeypatch.setattr(support, "find_spec", lambda package: None)
    flags = ("--attn_implementation flash_attention_3", "--use_liger_kernel", "--load_in_4bit")
    modules = ("torch", "liger_kernel", "bitsandbytes")
    said = missing(
        use_liger_kernel=True,
        attn_implementation="flash_attention_3",
        load_in_4bit=True,
        deepcompile=True,
        experts_implementation="deepgemm",
    )
    for line, flag, module in zip(said[:3], flags, modules, strict=True):
        assert line.startswith(f"{flag}: the package {module} is not installed")
        assert ("torch sees no CUDA device" in line) == (module != "bitsandbytes")
    assert said[0].endswith(f". Mend that, or leave {flags[0]} out.")
    assert said[3].startswith("--deepcompile: ") and len(said) == 5
    assert said[4].startswith("--ds.experts_implementation deepgemm: the package kernels is not")


def test_fp16_needs_a_gpu_or_a_cpu_that_knows_it(monkeypatch):
    for is_known in (False, True):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda k=is_known: k)
        said = missing(param_dtype="fp16")
        assert len(said) == (not is_known)
        assert all("this CPU does not train in fp16. Type --bf16 or" in line for line in said)
        assert missing(param_dtype="bf16") == []


LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (hf.LlamaConfig(max_position_embeddings=2048), 2048),
        (hf.GPT2Config(n_positions=1024), 1024),
        (hf.LlamaConfig(max_position_embeddings=2048, rope_parameters=YARN), 8192),
        # Beyond, positions would depend on the longest sequence of a row.
        (hf.LlamaConfig(max_position_embeddings=2048, rope_parameters=DYNAMIC), 2048),
        (hf.Phi3Config(max_position_embeddings=131072, rope_parameters=LONGROPE), 4096),
        (hf.MambaConfig(), None),
    ],
    ids=["plain", "gpt2", "yarn", "dynamic", "longrope", "none"],
)
def test_the_longest_sequence_that_a_model_reads(
    config: hf.PretrainedConfig, expected: int | None
) -> None:
    assert num_positions(config) == expected


@pytest.mark.parametrize(
    ("config", "flags", "why"),
    [
        (hf.BloomConfig(), {}, "its rows are padded, not packed"),
        (
            hf.LlamaConfig(num_attention_heads=8, num_key_value_heads=2),
            {"cp_mode": "ulysses"},
            "has 2 heads, not a multiple of the 4 ranks",
        ),
        (
            hf.LlamaConfig(num_attention_heads=8, num_key_value_heads=4),
            {"cp_mode": "ulysses", "tensor_parallel_size": 2},
            "has 4 heads, not a multiple of the 8 ranks",
        ),
    ],
    ids=["padded", "heads", "heads of a part"],
)
def test_models_whose_rows_cannot_be_shared_are_refused(config, flags, why):
    with pytest.raises(ConfigError, match=why):
        refuse_unsupported(config, "m", DeepSpeedConfig(ring_attn_size=4, **flags))
    refuse_unsupported(config, "m", DeepSpeedConfig())


@pytest.mark.parametrize(("num_heads", "expected"), [(32, 8), (28, 7), (14, 7), (12, 6), (9, 3)])
def test_an_engine_takes_as_many_gpus_as_can_share_its_heads(num_heads: int, expected: int) -> None:
    config = hf.LlamaConfig(num_attention_heads=num_heads, hidden_size=num_heads * 64)
    assert most_workers(config, 8) == expected
    check_engine_split(config, "m", expected)


def test_a_budget_of_tokens_does_not_bound_padded_rows():
    with pytest.raises(ConfigError, match="--use_dynamic_batch: the rows of m are padded"):
        refuse_unsupported(hf.BloomConfig(), "m", DeepSpeedConfig(), has_token_budget=True)


def test_a_command_says_that_it_pads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BLOOM is the family of KTO's default model."""
    model = make_model(tmp_path / "model", "bloom", hidden_size=32)
    rows = [{"input": f"q{k}", "output": "ab"[k % 2], "label": k % 2} for k in range(8)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    words = f"--pretrain {model} --dataset {data} --save_path {tmp_path}/run --input_key input "
    words += "--output_key output --label_key label --train_batch_size 8"
    train_kto.main([*words.split(), "--micro_train_batch_size", "4"])
    said = f"{model}: BloomForCausalLM has an attention of its own: the sequences of a micro-batch"
    assert said in capsys.readouterr().err
    hf.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
