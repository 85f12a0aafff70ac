"""Finished samples that no step has taken yet, as a checkpoint keeps them: token-exact, with
log-probs, versions and rewards.

Tensors are in one file, the rest is JSON beside it. What the data set says of
a prompt is not kept: it is read there again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError

from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.engines.base import SamplingSettings
from openrlhf.rollout.rollout import GroupKey
from openrlhf.utils.rollout import Rollout

NOTES = "finished_groups.json"
TENSORS = "finished_groups.safetensors"
TENSOR_FIELDS = ("token_ids", "action_mask", "logprobs", "weight_versions")
JSON_FIELDS = (
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
            f"{rollout.sample_id}.{name}": getattr(rollout, name).clone()  # of its own memory
            for rollout in rollouts
            for name in TENSOR_FIELDS
        }
        try:
            safetensors.torch.save_file(tensors, folder / TENSORS)
        except SafetensorError as error:  # e.g. a full disk
            raise OSError(str(error)) from error
        groups = [
            {
                "key": group.key,
                "age": group.age,
                "rollouts": [
                    {name: getattr(rollout, name) for name in JSON_FIELDS}
                    for rollout in group.rollouts
                ],
            }
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
    tensors = safetensors.torch.load_file(folder / TENSORS)
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
                **{name: tensors[f"{fact['sample_id']}.{name}"] for name in TENSOR_FIELDS},
                **fact,
            )
            for fact in group["rollouts"]
        ]
        groups.append(KeptGroup((episode, row), group["age"], rollouts))
    return KeptGroups(origin, groups)
