"""The weight transport under its earlier name, which checks on GPU machines import."""

from openrlhf.trainer.workers.weight_sync import WeightTransport

__all__ = ["WeightTransport"]
