"""Imported by the workers of an engine: their weights stay plain, as they are on a GPU."""

from __future__ import annotations

from vllm import _custom_ops

from openrlhf.engines.weight_receiver import ReceiptExtension

_custom_ops._supports_onednn = False


class PlainExtension(ReceiptExtension):
    """The same calls in a worker that packs nothing."""
