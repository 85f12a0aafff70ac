"""Finished samples that no step has taken yet, as a checkpoint keeps them: token-exact, with
log-probs, versions and rewards.

Numbers lie end to end in one file of tensors, the rest is JSON beside it. What the data set says of
a prompt is not kept: it is read there again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.engines.base import SamplingSettings
from openrlhf.rollout.rollout import GroupKey
from openrlhf.utils.rollout import Rollout

NOTES = "finished_groups.json"
TENSORS = "finished_groups.safetensors"
PER_TOKEN = {"token_ids": torch.int64, "action_mask": torch.bool}
PER_ACTION = {"logprobs": torch.float32, "weight_versions": torch.int32}
PLAIN = (
    "sample_id",
    "finish_reason",
    "prompt_text",
    "response_text",
    "reward",
    "score",
    "extra_logs",
    "episode_id",
    "reward_parts",
    "extra_columns",
)


def sample_origin(sampling: SamplingSettings, reward: Mapping[str, Any]) -> dict[str, Any]:
    """Return how samples are made and rewarded, as JSON; those of another origin are not taken up.

    `reward` is what decides the reward of a sample.
    """
    origin: dict[str, Any] = json.loads(
        json.dumps({"sampling": asdict(sampling), "reward": dict(reward)})
    )
    return origin


@dataclass(frozen=True)
class KeptGroup:
    """The scored samples of a prompt that wait for their step."""

    key: GroupKey
    age: int  # steps that ended since it was started
    rollouts: list[Rollout]


@dataclass(frozen=True)
class KeptGroups:
    """What is finished and not trained on, in the order of finishing."""

    origin: Mapping[str, Any]
    groups: Sequence[KeptGroup] = ()

    def write(self, folder: Path) -> None:
        """Write all into a folder; no file where there is nothing. Raises OSError."""
        if not self.groups:
            return
        rollouts = [rollout for group in self.groups for rollout in group.rollouts]
        tensors = {
            name: torch.cat([getattr(rollout, name).to(dtype) for rollout in rollouts])
            for name, dtype in (PER_TOKEN | PER_ACTION).items()
        }
        try:
            safetensors.torch.save_file(tensors, folder / TENSORS)
        except SafetensorError as error:  # e.g. a full disk
            raise OSError(str(error)) from error
        groups = [
            {"key": group.key, "age": group.age, "rollouts": list(map(_notes, group.rollouts))}
            for group in self.groups
        ]
        notes = {"origin": self.origin, "groups": groups}
        (folder / NOTES).write_text(json.dumps(notes))


def read_groups(folder: Path, prompts: PromptDataset, origin: Mapping[str, Any]) -> KeptGroups:
    """Return what `KeptGroups.write` wrote; nothing where samples are made or rewarded in
    another way now.
    """
    path = folder / NOTES
    notes = json.loads(path.read_text()) if path.exists() else None
    if notes is None or notes.get("origin") != origin:
        return KeptGroups(origin)
    facts = [rollout for group in notes["groups"] for rollout in group["rollouts"]]
    tensors = safetensors.torch.load_file(folder / TENSORS)
    sizes = {name: [fact["num_tokens"] for fact in facts] for name in PER_TOKEN}
    sizes |= {name: [fact["num_actions"] for fact in facts] for name in PER_ACTION}
    columns = {name: iter(tensors[name].split(sizes[name])) for name in sizes}
    groups = []
    for group in notes["groups"]:
        episode, row = group["key"]
        prompt = prompts[row]
        rollouts = [
            Rollout(
                group_id=0,  # a step gives it one
                row_id=prompt.row_id,
                label=prompt.label,
                datasource=prompt.datasource,
                columns=prompt.columns,
                **{name: next(column).clone() for name, column in columns.items()},
                **{name: fact[name] for name in PLAIN if name in fact},
            )
            for fact in group["rollouts"]
        ]
        groups.append(KeptGroup((episode, row), group["age"], rollouts))
    return KeptGroups(origin, groups)


def _notes(rollout: Rollout) -> dict[str, Any]:
    sizes = {"num_tokens": len(rollout.token_ids), "num_actions": rollout.num_actions}
    return sizes | {name: getattr(rollout, name) for name in PLAIN}
