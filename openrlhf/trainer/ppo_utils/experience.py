"""Experience: a ragged batch of scored samples, columns laid end to end without padding.

Every column has one of three axes: token (T), action (N: sampled tokens only) or sample (B);
`select` and `concat` keep the three in step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from openrlhf.utils.packing import Batch, PackedBatch
from openrlhf.utils.rollout import Rollout

TOKEN, ACTION, SAMPLE = ({"axis": axis} for axis in ("token", "action", "sample"))


@dataclass(frozen=True)
class Experience(Batch):
    """B samples, T tokens, N sampled tokens."""

    seq_lengths: Tensor = field(metadata=SAMPLE)  # (B,) int64, sums to T
    num_actions: Tensor = field(metadata=SAMPLE)  # (B,) int64, sums to N
    group_ids: Tensor = field(metadata=SAMPLE)  # (B,) int64
    # (B,) int64: the parts of an agent's episode share it, any other sample is an episode
    episode_ids: Tensor = field(metadata=SAMPLE)
    rewards: Tensor = field(metadata=SAMPLE)  # (B,) float32, finite
    is_truncated: Tensor = field(metadata=SAMPLE)  # (B,) bool
    places: Tensor = field(metadata=SAMPLE)  # (B,) int64: number of the sample in its step
    token_ids: Tensor = field(metadata=TOKEN)  # (T,) int64
    action_mask: Tensor = field(metadata=TOKEN)  # (T,) bool
    rollout_logprobs: Tensor = field(metadata=ACTION)  # (N,) float32, from the engine
    weight_versions: Tensor = field(metadata=ACTION)  # (N,) int32
    old_logprobs: Tensor | None = field(default=None, metadata=ACTION)  # (N,) None: on-policy
    ref_logprobs: Tensor | None = field(default=None, metadata=ACTION)  # (N,)
    values: Tensor | None = field(default=None, metadata=ACTION)  # (N,)
    advantages: Tensor | None = field(default=None, metadata=ACTION)  # (N,)
    returns: Tensor | None = field(default=None, metadata=ACTION)  # (N,)
    # (N,) in the policy's loss, when it first saw a sample; NaN: it did not need to
    new_logprobs: Tensor | None = field(default=None, metadata=ACTION)

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout]) -> "Experience":
        """Lay scored rollouts end to end; every one must have a finite reward."""
        rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float32)
        names = [r.episode_id or f"sample {index}" for index, r in enumerate(rollouts)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        assert torch.isfinite(rewards).all(), "an unscored or non-finite sample reached training"
        return cls(
            seq_lengths=torch.tensor([len(r.token_ids) for r in rollouts]),
            num_actions=torch.tensor([r.num_actions for r in rollouts]),
            group_ids=torch.tensor([r.group_id for r in rollouts]),
            episode_ids=torch.tensor([numbers[name] for name in names]),
            rewards=rewards,
            is_truncated=torch.tensor([r.is_truncated for r in rollouts]),
            places=torch.arange(len(rollouts)),
            token_ids=torch.cat([r.token_ids for r in rollouts]),
            action_mask=torch.cat([r.action_mask for r in rollouts]),
            rollout_logprobs=torch.cat([r.logprobs for r in rollouts]),
            weight_versions=torch.cat([r.weight_versions for r in rollouts]),
        )

    def __len__(self) -> int:
        return len(self.seq_lengths)

    def _mapped(self, change: Callable[[str, Tensor], Tensor]) -> "Experience":
        """Return experience with `change(axis, column)` in place of every column there is."""
        there = [column for column in fields(self) if getattr(self, column.name) is not None]
        return Experience(
            **{c.name: change(c.metadata["axis"], getattr(self, c.name)) for c in there}
        )

    def select(self, indices: Sequence[int]) -> "Experience":
        """Return the samples at `indices`, in that order; may be empty."""
        sizes = {"token": self.seq_lengths.tolist(), "action": self.num_actions.tolist()}

        def picked(axis: str, column: Tensor) -> Tensor:
            if axis == "sample":
                return column[list(indices)]
            parts = column.split(sizes[axis])
            return torch.cat([column[:0], *(parts[index] for index in indices)])

        return self._mapped(picked)

    @property
    def episodes(self) -> list[list[int]]:
        """Return the samples of every episode: one, or the parts of an agent's episode."""
        members: dict[int, list[int]] = {}
        for index, episode in enumerate(self.episode_ids.tolist()):
            members.setdefault(episode, []).append(index)
        return list(members.values())

    @property
    def response_lengths(self) -> Tensor:
        """Return the sampled tokens of the whole episode of every sample, (B,) int64."""
        lengths_B = self.num_actions.clone()
        for members in self.episodes:
            lengths_B[members] = self.num_actions[members].sum()
        return lengths_B

    def learned_columns(self) -> list[dict[str, object]]:
        """Return for each sample what the files of rollouts say of its training: the mean of its
        advantages, and (A,) arrays, None where nothing was computed.
        """
        sizes = self.num_actions.tolist()
        rows: list[dict[str, object]] = [{} for _ in sizes]
        for name in ("old_logprobs", "new_logprobs", "advantages"):
            column = getattr(self, name)
            parts = [None] * len(sizes) if column is None else column.split(sizes)
            for row, part in zip(rows, parts, strict=True):
                is_known = part is not None and not part.isnan().any()
                row[name] = part.numpy() if is_known else None
        for row, part in zip(rows, self.advantages.split(sizes), strict=True):
            row["advantage"] = part.mean().item()
        return rows

    def stand_in(self) -> "Experience":
        """Return a sample of two tokens with the same columns, where a rank has nothing to do."""
        sizes = {"token": 2, "action": 1, "sample": 1}
        zeros = self._mapped(lambda axis, column: column.new_zeros(sizes[axis]))
        return replace(
            zeros,
            seq_lengths=torch.tensor([2]),
            num_actions=torch.tensor([1]),
            action_mask=torch.tensor([False, True]),
        )

    def packed(self) -> PackedBatch:
        """Return one packed row whose targets are the sampled tokens."""
        return PackedBatch(self.token_ids, tuple(self.seq_lengths.tolist()), self.action_mask)


def scatter_back(
    parts: Sequence[Tensor], indices: Sequence[Sequence[int]], sizes: Tensor
) -> Tensor:
    """Undo a partition: per-part flat columns back into sample order.

    `parts[k]` holds the entries of samples `indices[k]` end to end: `sizes` (B,) of them each, at
    least one, or one a sample.
    """
    if all(len(part) == len(members) for part, members in zip(parts, indices, strict=True)):
        sizes = torch.ones_like(sizes)
    chunks: dict[int, Tensor] = {}
    for part, members in zip(parts, indices, strict=True):
        own = part.split([int(sizes[i]) for i in members]) if len(members) else ()
        chunks |= zip(members, own, strict=True)
    return torch.cat([chunks[sample] for sample in range(len(sizes))])
