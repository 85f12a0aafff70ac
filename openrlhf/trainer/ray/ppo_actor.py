"""The policy's worker under the name that the documents give."""

from openrlhf.trainer.workers.policy import PolicyModelActor

__all__ = ["PolicyModelActor"]
