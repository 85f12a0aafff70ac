"""The random numbers still to come, of Python, NumPy and torch, as JSON: one process's share."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """Where every generator of this process stands."""
    version, words, gauss_next = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(words), gauss_next],
        "numpy": [kind, keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _as_hex(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _as_hex(torch.cuda.get_rng_state())
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put every generator where `random_state` found it."""
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_as_bytes(state["torch"]))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(_as_bytes(state["cuda"]))


def _as_hex(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _as_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
