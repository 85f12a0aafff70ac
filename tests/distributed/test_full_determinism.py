"""--full_determinism: what it switches on."""

import os

import pytest
import torch

from openrlhf.distributed.strategy import set_seed

# What transformers sets.
NAMES = (
    *("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "CUDA_LAUNCH_BLOCKING"),
    *("ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC"),
)


def test_nondeterministic_kernels_are_refused_and_flash_attention_sums_in_a_fixed_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # noted, to be put back
        monkeypatch.delenv(name)
    set_seed(7)
    assert round(torch.rand(1).item(), 4) == 0.5349  # torch's first number of seed 7
    try:
        set_seed(7, full_determinism=True)
        assert round(torch.rand(1).item(), 4) == 0.5349
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
