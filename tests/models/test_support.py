"""Kernels of other packages: called as they are documented where they are, refused where not; and
sizes that a model's config tells before its weights are read.
"""

import sys

import pytest
import torch
import transformers as hf

from openrlhf.config.common import DeepSpeedConfig
from openrlhf.errors import ConfigError
from openrlhf.models import support
from openrlhf.models.loading import apply_liger, load_causal_lm
from openrlhf.models.support import check_here, num_positions
from tests.models.helpers import tiny_model

# What of Liger's interface is used, as a package that notes the call on the model.
LIGER = """
def _apply_liger_kernel_to_instance(model, **kwargs):
    model.liger_call = kwargs
"""


@pytest.fixture(scope="module")
def qwen2_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("kernels"), "qwen2")


@pytest.fixture
def liger_package(tmp_path, monkeypatch):
    folder = tmp_path / "liger_kernel" / "transformers"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(LIGER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def test_liger_is_applied_without_its_loss_kernels(qwen2_dir, liger_package):
    model = load_causal_lm(qwen2_dir)
    apply_liger(model)
    assert model.liger_call == {"cross_entropy": False, "fused_linear_cross_entropy": False}


@pytest.fixture
def bare(monkeypatch):
    """A machine on which none of the optional packages is installed."""
    monkeypatch.setattr(support, "find_spec", lambda package: None)


def missing(**settings: object) -> list[str]:
    """What a machine without a GPU lacks for these settings."""
    try:
        check_here(DeepSpeedConfig(**settings), is_cuda=False)
    except ConfigError as error:
        return error.problems
    return []


def test_everything_a_machine_lacks_is_said_at_once(bare):
    flags = ("--attn_implementation flash_attention_3", "--use_liger_kernel", "--load_in_4bit")
    modules = ("torch", "liger_kernel", "bitsandbytes")
    said = missing(
        use_liger_kernel=True,
        attn_implementation="flash_attention_3",
        load_in_4bit=True,
        deepcompile=True,
    )
    for line, flag, module in zip(said[:3], flags, modules, strict=True):
        assert line.startswith(f"{flag}: the package {module} is not installed")
        assert ("torch sees no CUDA device" in line) == (module != "bitsandbytes")
    assert said[0].endswith(f". Mend that, or leave {flags[0]} out.")
    assert said[3].startswith("--deepcompile: ") and len(said) == 4


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
