"""The data sets that a command names, and how it reads their rows.

Files and columns are checked here without a model or a tokenizer, so that what is wrong with them
is said together with what is wrong elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset

from openrlhf.config.base import Base, is_given
from openrlhf.config.common import CommandConfig, TextDataConfig
from openrlhf.config.local_paths import is_local_data
from openrlhf.config.ppo import PPOConfig, PPODataConfig
from openrlhf.config.serving import BatchInferenceConfig
from openrlhf.config.supervised import (
    DatasetConfig,
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
)
from openrlhf.datasets.loading import load_rows
from openrlhf.datasets.problems import Gathered
from openrlhf.datasets.process_reward_dataset import ProcessRewardDataset
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.reward_dataset import PreferenceDataset
from openrlhf.datasets.sft_dataset import PretrainText, SFTDataset
from openrlhf.datasets.tokenized import RowFormat, TokenizedDataset
from openrlhf.datasets.unpaired_preference_dataset import UnpairedPreferenceDataset
from openrlhf.utils.tokenizer import Tokenizer

# What stands before the problems of a data set.
TRAINING, EVALUATION, PRETRAIN = "", "evaluation: ", "--pretrain_data: "


@dataclass(frozen=True)
class DataSet:
    """A data set that a command names; nothing of it is read yet."""

    spec: str
    options: Mapping[str, Any]  # of load_rows
    kind: type[TokenizedDataset]
    form: RowFormat
    about: str = TRAINING

    def read(self, gathered: Gathered) -> Dataset | None:
        """Return the rows, or None; note problems of files and columns."""
        rows = gathered.attempt(partial(load_rows, self.spec, **self.options), about=self.about)
        if rows is not None:
            gathered.attempt(partial(self.kind.find_columns, self.form, rows), about=self.about)
        return rows

    def tokenise(self, gathered: Gathered, rows: Dataset, tokenizer: Tokenizer) -> Any:
        """Return the data set of the rows, or None; note problems of rows."""
        return gathered.attempt(partial(self.kind, rows, tokenizer, self.form), about=self.about)


def column_problems(config: CommandConfig) -> list[str]:
    """Return the problems of files and columns of the data sets that are on this machine."""
    gathered = Gathered()
    for data_set in data_sets(config):
        if is_local_data(data_set.spec):
            data_set.read(gathered)
    return list(dict.fromkeys(gathered.problems))


def data_sets(config: CommandConfig) -> Iterator[DataSet]:
    """Yield the data sets to train on or to answer, the evaluation data, the text of
    --pretrain_data.
    """
    if isinstance(config, PPOConfig):
        yield from ppo_data(config)
    elif isinstance(config, SupervisedConfig):
        yield from supervised_data(config)
    elif isinstance(config, BatchInferenceConfig) and config.eval_task is not None:
        yield inference_data(config)


def supervised_data(config: SupervisedConfig) -> Iterator[DataSet]:
    """Yield the training data and, where it is named, the evaluation data."""
    data, held_out = config.data, config.eval
    reading, options = _reading(config), partial(_options, data, config.train.seed)
    named = options(data.dataset_split) | _expected(data, data.dataset_probs)
    yield DataSet(data.dataset or "", named, *reading)
    if held_out.dataset:
        yield DataSet(held_out.dataset, options(held_out.split), *reading, EVALUATION)


def _reading(config: SupervisedConfig) -> tuple[type[TokenizedDataset], RowFormat]:
    """Return the kind of data set that a supervised command trains on, and how it is read."""
    data = config.data
    match config:
        case SFTConfig():
            is_text = _if_given(config.model, "pretrain_mode_enable")
            return SFTDataset, _row_format(data, pretrain_mode=is_text)
        case KDConfig():
            is_text = config.model.pretrain_mode_enable
            return SFTDataset, _row_format(data, pretrain_mode=is_text)
        case KTOConfig():
            return UnpairedPreferenceDataset, _row_format(data)
        case RMConfig():
            with_margin = config.model.margin_loss_enable
            return PreferenceDataset, _row_format(data, with_margin=with_margin)
        case DPOConfig():
            return PreferenceDataset, _row_format(data)
        case PRMConfig():
            marker, tokens = config.model.placeholder_token, config.model.reward_tokens
            form = _row_format(data, placeholder_token=marker or "", reward_tokens=tokens or ())
            return ProcessRewardDataset, form
    raise AssertionError(type(config).__name__)


def ppo_data(config: PPOConfig) -> Iterator[DataSet]:
    """Yield prompts and, where they are named, those of the evaluation and pre-training text."""
    data, held_out, prompts = config.data, config.eval, config.data.prompt_dataset or ""
    form = _prompt_format(data, label_key=data.label_key)
    options = partial(_options, data, config.train.seed)
    named = options(data.prompt_split) | _expected(data, data.prompt_probs)
    yield DataSet(prompts, named, PromptDataset, form)
    if held_out.dataset:
        is_training = (held_out.dataset, held_out.split) == (prompts, data.prompt_split)
        others = named if is_training else options(held_out.split)
        yield DataSet(held_out.dataset, others, PromptDataset, form, EVALUATION)
    if data.pretrain_dataset and config.actor.ptx_coef != 0:
        texts = options(data.pretrain_split) | {"probs": data.pretrain_probs}
        form = RowFormat(  # cut at the length of prompt and response together
            input_key=_if_given(data, "pretrain_key"),
            pretrain_mode=True,
            max_len=data.max_len or data.prompt_max_len + config.rollout.max_new_tokens,
            overlong="truncate",
            allow_special_tokens=data.allow_special_tokens,
        )
        yield DataSet(data.pretrain_dataset, texts, PretrainText, form, PRETRAIN)


def inference_data(config: BatchInferenceConfig) -> DataSet:
    """Return the data set that is answered or scored."""
    data = config.data
    options = _options(data, config.seed, data.dataset_split) | _expected(data, data.dataset_probs)
    kind: type[TokenizedDataset] = PromptDataset
    if config.eval_task == "rm":
        kind, form = SFTDataset, _row_format(data)
    else:
        form = _prompt_format(data)
    return DataSet(data.dataset or "", options, kind, form)


def _row_format(data: DatasetConfig, **more: Any) -> RowFormat:
    """Return how the rows of --dataset are read."""
    keys = ("input_key", "output_key", "label_key", "prompt_key")
    return RowFormat(
        **{name: _if_given(data, name) for name in keys},
        usual_output=None if is_given(data, "output_key") else data.output_key,
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        multiturn=data.multiturn,
        max_len=data.max_len,
        overlong=data.overlong_rows,
        **_common(data),
        **more,
    )


def _prompt_format(data: TextDataConfig, **more: Any) -> RowFormat:
    """Return how rows become prompts."""
    return RowFormat(
        input_key=_if_given(data, "input_key"),
        max_len=data.prompt_max_len,
        overlong=data.overlong_prompts,
        **_common(data),
        **more,
    )


def _common(data: TextDataConfig) -> dict[str, Any]:
    return {
        "input_template": data.input_template,
        "apply_chat_template": _if_given(data, "apply_chat_template"),
        "allow_special_tokens": data.allow_special_tokens,
    }


def _if_given(settings: Base, name: str) -> Any:
    """Return a setting that somebody typed, or None."""
    return getattr(settings, name) if is_given(settings, name) else None


def _options(data: DatasetConfig | PPODataConfig, seed: int, split: str) -> dict[str, Any]:
    """Return the options of `load_rows` for a data set of a command."""
    caps = {"max_samples": data.max_samples, "seed": seed, "duplicate_ids": data.duplicate_ids}
    return {"split": split, **caps}


def _expected(data: TextDataConfig, probs: str | None) -> dict[str, Any]:
    """Return the options of `load_rows` that are those of training data alone."""
    facts = {"expect_rows": data.expect_rows, "expect_sha256": data.expect_sha256}
    return {"probs": probs, **facts}
