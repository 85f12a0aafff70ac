"""The optimizer steps that ranks get of a rollout batch."""

from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.update_plan import UpdateShare, plan_updates, update_shares


def planned_shares(experience: Experience, num_ranks: int, **options: Any) -> list[UpdateShare]:
    """Return the share of every rank."""
    return list(update_shares(experience, plan_updates(experience, num_ranks, **options)))
