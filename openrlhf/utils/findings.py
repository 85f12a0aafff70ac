"""What `openrlhf doctor` finds of a machine."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A fact that a probe has seen, and the words to type if it is not fine.

    Example: `Finding("open files", "at most 1024", "Type ulimit -n 65536.")`
    """

    subject: str
    seen: str
    remedy: str = ""


@dataclass(frozen=True)
class NodeReport:
    """The findings of one node, its versions and its GPUs.

    Example: `NodeReport([Finding("memory", "64 GiB")], {"torch": "2.13.0"}, num_gpus=8)`
    """

    findings: Sequence[Finding]
    versions: dict[str, str]
    num_gpus: int  # in /dev
