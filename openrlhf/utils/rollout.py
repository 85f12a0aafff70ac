"""One finished sample, as it travels from the engines to the trainer: tokens in, tokens out, and
its outcome.

A literal example: prompt ids [7, 8], sampled ids [9, 2] give token_ids [7, 8, 9, 2] and
action_mask [F, F, T, T]; logprobs has one number per sampled token.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.errors import EngineError
from openrlhf.utils.images import Picture

MAX_LOGPROB = 1e-3  # above 0 by rounding


@dataclass(frozen=True)
class PromptRecord:
    """One prompt as the engines get it.

    Example: `PromptRecord(0, "2 + 3 =", (17, 488, 18, 284), label="5")`
    """

    row_id: int  # index of the row in the data set, before anything was dropped
    prompt_text: str
    prompt_token_ids: tuple[int, ...]
    label: object = ""  # without --label_key
    datasource: str = "default"
    columns: dict[str, object] = field(default_factory=dict)  # the row's other columns
    source: object = None  # the prompt as its row has it: text, or messages
    images: tuple[Picture, ...] = ()  # each has its run of placeholders in the token ids
    num_image_tokens: int = 0  # of all placeholders

    @property
    def of_samples(self) -> dict[str, Any]:
        """Return the fields that all samples of the prompt share, by the names of `Rollout`."""
        return {
            "row_id": self.row_id,
            "label": self.label,
            "datasource": self.datasource,
            "columns": self.columns,
            "source_prompt": self.source,
            "images": self.images,
            "num_image_tokens": self.num_image_tokens,
        }


@dataclass(frozen=True)
class Rollout:
    """A sample of one prompt; T tokens in all, A of them sampled by the policy.

    Example: prompt [7, 8] and response [9, 2] of row 16 are `token_ids` [7, 8, 9, 2], `action_mask`
    [F, F, T, T], two `logprobs`, and `sample_id` "step3/17/0".
    """

    sample_id: str  # "<tag>/<row>/<k>", rows counted from 1; unique in a run
    group_id: int  # samples of the same prompt in the same step share it
    row_id: int  # row of the prompt data set
    token_ids: Tensor  # (T,) int32: prompt and everything that followed
    action_mask: Tensor  # (T,) bool: tokens the policy sampled
    logprobs: Tensor  # (A,) float32: log-probs reported by the engine at the sampling temperature
    weight_versions: Tensor  # (A,) int32: version of the weights each token was sampled under
    finish_reason: str  # "stop" or "length"
    prompt_text: str
    response_text: str  # with special tokens
    label: object = ""
    datasource: str = "default"
    columns: dict[str, object] = field(default_factory=dict)  # further columns of the row
    reward: float | None = None
    score: float | None = None  # raw 0-1 task score, where the reward source gives one
    extra_logs: dict[str, float] = field(default_factory=dict)
    # Shared by the parts of an agent's episode, which share a reward; empty: a sample of its own.
    episode_id: str = ""
    reward_parts: dict[str, float] = field(default_factory=dict)  # of several functions or models
    # For the reward source: the prompt as its row has it, the response without special tokens.
    source_prompt: object = None
    plain_response: str = ""  # empty in an agent's episode
    extra_columns: dict[str, object] = field(
        default_factory=dict
    )  # what the reward source noted besides
    images: tuple[Picture, ...] = ()  # whose placeholders `token_ids` have, in order
    num_image_tokens: int = 0  # of all placeholders

    @property
    def num_actions(self) -> int:
        """Return the number of sampled tokens."""
        return len(self.logprobs)

    @property
    def is_truncated(self) -> bool:
        """Return True if the response was cut by the length limit."""
        return self.finish_reason == "length"

    @property
    def task_score(self) -> float:
        """Return the score if there is one, else the reward."""
        value = self.reward if self.score is None else self.score
        assert value is not None, f"sample {self.sample_id} was never scored"
        return value


def fields_of(rollout: Rollout, *, left_out: Container[str]) -> dict[str, object]:
    """Return the fields of a sample for a file of tensors, which are in memory of their own; its
    images by their hashes, which name files.
    """
    values = {name: v for name, v in vars(rollout).items() if name not in left_out}
    values["images"] = [image.sha256 for image in rollout.images]
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in values.items()}


def checked_arrays(
    sample_id: str,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    *,
    vocab_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a completion, int64, and their log-probs, float32; raise EngineError for
    no token, ids outside the vocabulary, missing or impossible log-probs.
    """
    if not token_ids or len(token_ids) != len(logprobs):
        raise EngineError(
            f"sample {sample_id}: {len(token_ids)} tokens and {len(logprobs)} log-probs"
        )
    # Ids of any size; None is NaN
    ids, numbers = np.array(token_ids), np.array(logprobs, np.float32)
    is_right = np.isfinite(numbers) & (numbers <= MAX_LOGPROB) & (ids >= 0) & (ids < vocab_size)
    if not is_right.all():
        position = int(is_right.argmin())
        raise EngineError(
            f"sample {sample_id}: token {token_ids[position]} with log-prob {logprobs[position]} "
            f"at {position}; ids are 0..{vocab_size - 1}"
        )
    return ids, numbers


def sequence_tensors(
    prompt_ids: Sequence[int], response_ids: Sequence[int] | np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return token ids (T,) int32 and action mask (T,) bool of a single-turn sample."""
    parts = np.array(prompt_ids, np.int32), np.asarray(response_ids, np.int32)
    token_ids = torch.from_numpy(np.concatenate(parts))
    action_mask = torch.zeros(len(token_ids), dtype=torch.bool)
    action_mask[len(prompt_ids) :] = True
    return token_ids, action_mask
