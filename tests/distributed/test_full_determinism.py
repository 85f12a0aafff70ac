"""--full_determinism: what it switches on, in a process of its own, for it holds for all of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# `put_` without accumulation is one of the operations that torch has no deterministic kernel for;
# the flash attention of transformers is only asked for its arguments, which needs no GPU.
PROBE = """
import collections, json, os
import torch
from transformers.modeling_flash_attention_utils import _process_flash_attention_kwargs
from openrlhf.distributed.strategy import set_seed

KNOWN = collections.defaultdict(bool, deterministic=True)

def is_refused():
    try:
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    except RuntimeError as error:
        return "does not have a deterministic implementation" in str(error)
    return False

def found(**options):
    set_seed(7, **options)
    flash = _process_flash_attention_kwargs(4, 4, is_causal=True, supports_mapping=KNOWN)
    return {
        "drawn": torch.rand(1).item(),
        "is_refused": is_refused(),
        "flash": flash["deterministic"],
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }

without, switched_on = found(), found(full_determinism=True)
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
print(json.dumps([without, switched_on, found(full_determinism=True)]))
"""
DRAWN = pytest.approx(0.5349, abs=1e-4)  # the first number of torch's generator with seed 7


def test_nondeterministic_kernels_are_refused_and_flash_attention_sums_in_a_fixed_order() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    environment["FLASH_ATTENTION_DETERMINISTIC"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    without, switched_on, with_own_workspace = json.loads(done.stdout.splitlines()[-1])
    assert without == {"drawn": DRAWN, "is_refused": False, "flash": False, "cublas": None}
    assert switched_on == {"drawn": DRAWN, "is_refused": True, "flash": True, "cublas": ":4096:8"}
    assert with_own_workspace == switched_on | {"cublas": ":16:8"}
