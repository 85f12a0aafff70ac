"""--full_determinism: what it switches on."""

from __future__ import annotations

import os

import pytest
import torch

from openrlhf.distributed.strategy import set_seed

# What transformers sets.
NAMES = (
    *("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "CUDA_LAUNCH_BLOCKING"),
    *("ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC"),
)


def drawn_and_refused() -> tuple[float, bool]:
    """The next random number, and True if a kernel without a deterministic form is refused."""
    drawn, is_refused = round(torch.rand(1).item(), 4), False
    try:
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    except RuntimeError as error:
        is_refused = "does not have a deterministic implementation" in str(error)
    return drawn, is_refused


def test_nondeterministic_kernels_are_refused_and_flash_attention_sums_in_a_fixed_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # noted, to be put back
        monkeypatch.delenv(name)
    set_seed(7)
    assert drawn_and_refused() == (0.5349, False)  # torch's first number of seed 7
    try:
        set_seed(7, full_determinism=True)
        assert drawn_and_refused() == (0.5349, True)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
