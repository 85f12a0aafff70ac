"""What `openrlhf doctor` finds of a machine."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What a probe saw, and what to type if it is not fine.

    Example: `Finding("open files", "at most 1024", "Type ulimit -n 65536.")`
    """

    subject: str
    seen: str
    remedy: str = ""


@dataclass(frozen=True)
class NodeReport:
    """What one node found of itself."""

    findings: Sequence[Finding]
    versions: dict[str, str]
    num_gpus: int  # in /dev
