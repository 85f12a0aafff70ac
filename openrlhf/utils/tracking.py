"""The reader of metrics under the name that programs of users import."""

from openrlhf.utils.tracker import read_metrics

__all__ = ["read_metrics"]
