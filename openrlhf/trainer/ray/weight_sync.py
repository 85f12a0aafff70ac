"""Old names for checks on GPU machines; new transports are not added here."""

from typing import Any

import torch

from openrlhf.trainer.workers.weight_sync import (
    BroadcastTransport,
    HandleTransport,
    ObjectTransport,
)
from openrlhf.trainer.workers.weight_sync import WeightTransport as AnyTransport

WAYS = {"handles": HandleTransport, "broadcast": BroadcastTransport, "objects": ObjectTransport}


def WeightTransport(way: str, device: torch.device, *args: Any, **named: Any) -> AnyTransport:
    """Return the transport of this name, connected."""
    return WAYS[way](device, *args, **named)
