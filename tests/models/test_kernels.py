"""Kernels of other packages: called as they are documented where they are, refused where not."""

from __future__ import annotations

import sys

import pytest
import torch

from openrlhf.config.cli import parse_config
from openrlhf.config.common import DeepSpeedConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.errors import ConfigError
from openrlhf.models import kernels
from openrlhf.models.actor import Actor
from openrlhf.models.kernels import apply_liger, check_here, is_installed
from openrlhf.models.loading import load_causal_lm, load_sequence_model
from openrlhf.trainer.sft_trainer import SFTTrainer
from openrlhf.trainer.supervised_run import run_supervised
from tests.models.helpers import full_batch, gradients, random_sequences, tiny_model

NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="says what a machine without GPU lacks"
)
# What of Liger's interface is used, as a package that notes the call on the model.
LIGER = """
def _apply_liger_kernel_to_instance(model, **kwargs):
    model.liger_call = kwargs
"""


@pytest.fixture(scope="module")
def mixtral_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("kernels"), "mixtral")


@pytest.fixture(scope="module")
def qwen2_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("kernels"), "qwen2")


@pytest.fixture
def liger_package(tmp_path, monkeypatch):
    folder = tmp_path / "liger_kernel" / "transformers"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(LIGER)
    (folder / "monkey_patch.py").write_text("MODEL_TYPE_TO_APPLY_LIGER_FN = {'qwen2': None}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        del sys.modules[name]


@NO_GPU
def test_liger_is_refused_by_name_of_what_is_missing(qwen2_dir):
    with pytest.raises(ConfigError) as caught:
        load_causal_lm(qwen2_dir, use_liger_kernel=True)
    assert str(caught.value) == (
        "--use_liger_kernel: the liger-kernel package is not installed and torch sees no CUDA "
        "device. Run on a GPU, or leave --use_liger_kernel out."
    )


@NO_GPU
def test_liger_without_a_gpu_is_refused_for_reward_models_too(qwen2_dir, liger_package):
    with pytest.raises(ConfigError, match=r"^--use_liger_kernel: torch sees no CUDA device\. Run"):
        load_sequence_model(qwen2_dir, use_liger_kernel=True)


def test_liger_is_applied_without_its_loss_kernels(qwen2_dir, liger_package):
    model = load_causal_lm(qwen2_dir)
    apply_liger(model, is_cuda=True)
    assert model.liger_call == {"cross_entropy": False, "fused_linear_cross_entropy": False}


def test_a_family_that_liger_does_not_know_is_refused(mixtral_dir, liger_package):
    model = load_causal_lm(mixtral_dir)
    with pytest.raises(ConfigError, match=r"Liger has no kernels for model type 'mixtral'\. Leave"):
        apply_liger(model, is_cuda=True)


@pytest.mark.skipif(is_installed("bitsandbytes"), reason="says what is missing")
def test_four_bits_without_bitsandbytes_are_refused_before_the_weights_are_read(qwen2_dir):
    with pytest.raises(ConfigError) as caught:
        load_causal_lm(qwen2_dir, load_in_4bit=True)
    assert str(caught.value) == (
        "--load_in_4bit: the bitsandbytes package is not installed. "
        "Install bitsandbytes, or leave --load_in_4bit out."
    )


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_kernels_of_expert_layers_equal_the_plain_loop(implementation, mixtral_dir):
    batch = full_batch(random_sequences([30, 1, 17, 5]))
    stats, grads = [], []
    for name in ("eager", implementation):
        model = load_causal_lm(mixtral_dir, dtype=torch.float32, experts_implementation=name)
        assert model.config._experts_implementation == name
        stats.append(Actor(model)(batch).logprobs)
        stats[-1].mean().backward()
        grads.append(gradients(model))
    torch.testing.assert_close(stats[1], stats[0], atol=1e-5, rtol=0)
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient, atol=1e-5, rtol=0, msg=name)


def test_the_expert_kernel_without_gradients_is_refused(mixtral_dir):
    assert "computes no gradients" in missing(experts_implementation="deepgemm")[0]
    with pytest.raises(ConfigError, match=r"computes no gradients\. Use grouped_mm"):
        load_causal_lm(mixtral_dir, experts_implementation="deepgemm")


@pytest.fixture
def bare(monkeypatch):
    """A machine on which none of the optional packages is installed."""
    monkeypatch.setattr(kernels, "is_installed", lambda package: False)


def test_deepspeed_compiles_for_gpus_only():
    [line] = missing(deepcompile=True)
    assert line.startswith("--deepcompile: DeepSpeed compiles for CUDA GPUs only")
    check_here(DeepSpeedConfig(deepcompile=True), is_cuda=True)
    line = "--pretrain m --dataset d --deepcompile --zero_stage 0"
    with pytest.raises(ConfigError, match="Type --zero_stage 2"):
        parse_config(SFTConfig, line.split())


def missing(**settings: object) -> list[str]:
    """What a machine without a GPU lacks for these settings."""
    try:
        check_here(DeepSpeedConfig(**settings), is_cuda=False)
    except ConfigError as error:
        return error.problems
    return []


def test_settings_of_every_machine_lack_nothing():
    for name in ("auto", "sdpa", "eager", "flash_attention_2"):
        assert missing(attn_implementation=name, param_dtype="bf16", grad_accum_dtype="bf16") == []


def test_everything_a_machine_lacks_is_said_at_once(bare):
    assert missing(
        use_liger_kernel=True, attn_implementation="flash_attention_3", grad_accum_dtype="bf16"
    ) == [
        "--attn_implementation flash_attention_3: the flash-attn-3 package is not installed and "
        "torch sees no CUDA device. Run on a GPU, or leave --attn_implementation flash_attention_3 "
        "out.",
        "--use_liger_kernel: the liger-kernel package is not installed and torch sees no CUDA "
        "device. Run on a GPU, or leave --use_liger_kernel out.",
        "--grad_accum_dtype bf16 with fp32 parameters, as they are on a CPU: add --bf16 or leave "
        "it out.",
    ]


def test_an_attention_that_does_not_exist_is_refused_with_those_that_do(bare):
    [line] = missing(attn_implementation="flash_atention_2")
    assert line.startswith("--attn_implementation flash_atention_2 is not known. Type one of auto,")
    [line] = missing(attn_implementation="kernels-community/flash-attn2")
    assert "the kernels package is not installed and torch sees no CUDA device" in line


@NO_GPU
def test_a_command_says_what_is_missing_before_it_reads_anything():
    words = ["--pretrain", "no-model", "--dataset", "no-data", "--use_liger_kernel"]
    with pytest.raises(ConfigError, match=r"^--use_liger_kernel: "):
        run_supervised(SFTTrainer, parse_config(SFTConfig, words).config)
