"""fp16 where it cannot be trained in is one line, before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from openrlhf.config.common import DeepSpeedConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.models.kernels import check_here
from openrlhf.trainer.ray.model_actor import RankIdentity
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor

FP16 = DeepSpeedConfig(param_dtype="fp16")
LINE = r"--ds\.param_dtype fp16: this CPU does not train in fp16\. Type --bf16 or"


@pytest.fixture
def cpu_knows(monkeypatch: pytest.MonkeyPatch):
    """Decides whether this CPU multiplies matrices in fp16."""

    def decide(answer: bool) -> None:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: answer)

    return decide


def test_fp16_needs_a_gpu_or_a_cpu_that_knows_it(cpu_knows):
    cpu_knows(False)
    with pytest.raises(ConfigError, match=LINE):
        check_here(FP16, is_cuda=False)
    check_here(FP16, is_cuda=True)
    check_here(DeepSpeedConfig(param_dtype="bf16"), is_cuda=False)
    cpu_knows(True)
    check_here(FP16, is_cuda=False)


@pytest.mark.skipif("torch.cuda.is_available()", reason="this machine trains in fp16")
def test_a_worker_without_a_gpu_refuses_fp16_before_it_loads_a_model(cpu_knows, tmp_path: Path):
    cpu_knows(False)
    config = PPOConfig.model_validate({"ds": {"param_dtype": "fp16"}})
    with pytest.raises(ConfigError, match=LINE):
        PolicyModelActor(config, RankIdentity("actor", 0, 1, str(tmp_path))).setup()
