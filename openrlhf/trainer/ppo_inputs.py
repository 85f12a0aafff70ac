"""The checked inputs of an RL run, and the prompts it had to leave out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.distributed.checkpoints import DataIdentity
from openrlhf.engines.base import SamplingSettings
from openrlhf.rewards.base import RewardSource
from openrlhf.utils.console import notice
from openrlhf.utils.images import ImageProcessor
from openrlhf.utils.tokenizer import Tokenizer, TokenTexts


@dataclass(frozen=True)
class RunInputs:
    """Checked inputs of a run.

    Example: three steps of 4, 4 and 2 updates, and an evaluation: `updates` [4, 4, 2], `pass_rate`
    "eval/eval_math_pass1".
    """

    run_dir: Path
    tokenizer: Tokenizer
    token_texts: TokenTexts
    prompts: PromptDataset
    eval_prompts: PromptDataset | None
    texts: SFTDataset | None  # pre-training text that is mixed in
    sampling: SamplingSettings
    eval_sampling: SamplingSettings
    vocab_size: int
    image_processor: ImageProcessor | None = None  # of a policy that reads pictures
    reward_source: RewardSource | None = None  # functions or servers; None: local models, agents
    updates: Sequence[int] = (0,)  # optimizer steps of every rollout batch
    pass_rate: str | None = None  # by which evaluations are compared; None: there are none

    @property
    def data(self) -> DataIdentity:
        """Return the data that a run resumes on only: prompts, with the text that is mixed in."""
        data_sets = [data for data in (self.prompts, self.texts) if data is not None]
        return DataIdentity(" ".join(data.fingerprint for data in data_sets), len(self.prompts))


def say_dropped(failed: Mapping[int, str], prompts: PromptDataset) -> None:
    """Print how many prompts were dropped, and where and why the first of them was."""
    if failed:
        row, reason = next(iter(failed.items()))
        where = prompts.row_location(row)
        notice(f"dropped {len(failed)} prompt(s) without rewards; {where}: {reason}")
