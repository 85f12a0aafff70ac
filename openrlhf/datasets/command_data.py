"""The data sets that a command names, and how it reads their rows.

Files and columns are checked here without a model or a tokenizer, so that what is wrong with them
is said together with what is wrong elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from datasets import Dataset

from openrlhf.config.base import Base, is_given
from openrlhf.config.common import CommandConfig, TextDataConfig
from openrlhf.config.local_paths import is_local_data
from openrlhf.config.ppo import PPOConfig, PPODataConfig
from openrlhf.config.serving import BatchInferenceConfig, InferenceDataConfig
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
from openrlhf.datasets.conventions import TEXT_COLUMNS, pick_columns
from openrlhf.datasets.loading import load_rows
from openrlhf.datasets.problems import Gathered
from openrlhf.datasets.process_reward_dataset import ProcessFormat
from openrlhf.datasets.prompts_dataset import PromptFormat
from openrlhf.datasets.reward_dataset import PreferenceFormat
from openrlhf.datasets.sft_dataset import SFTFormat
from openrlhf.datasets.tokenized import RowFormat
from openrlhf.datasets.unpaired_preference_dataset import UnpairedFormat

Check = Callable[[Dataset], object]  # raises DataError that names columns that are not there

# What stands before the problems of a data set.
TRAINING, EVALUATION, PRETRAIN = "", "evaluation: ", "--pretrain_data: "


class DataSet(NamedTuple):
    """A data set that a command names; nothing of it is read yet."""

    spec: str
    options: Mapping[str, Any]  # of load_rows
    check: Check
    about: str = TRAINING

    def read(self, gathered: Gathered) -> Dataset | None:
        """Return the rows, or None; note problems of files and columns."""
        rows = gathered.attempt(partial(load_rows, self.spec, **self.options), about=self.about)
        if rows is not None:
            gathered.attempt(partial(self.check, rows), about=self.about)
        return rows


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
    held_out, check = config.eval, row_format(config).find_columns
    shared = _shared_options(config.data, config.train.seed)
    yield _named_rows(config.data, check, shared)
    if held_out.dataset:
        yield DataSet(held_out.dataset, {"split": held_out.split, **shared}, check, EVALUATION)


def _named_rows(data: DatasetConfig, check: Check, shared: dict[str, Any]) -> DataSet:
    """Return the data set that `data.dataset` names."""
    options = {"split": data.dataset_split, "probs": data.dataset_probs, **_expected(data)}
    return DataSet(data.dataset or "", options | shared, check)


def _expected(data: TextDataConfig) -> dict[str, Any]:
    return {"expect_rows": data.expect_rows, "expect_sha256": data.expect_sha256}


def _shared_options(data: DatasetConfig | PPODataConfig, seed: int) -> dict[str, Any]:
    """Return options of `load_rows` that are those of every data set of a command."""
    return {"max_samples": data.max_samples, "seed": seed, "duplicate_ids": data.duplicate_ids}


def row_format(config: SupervisedConfig) -> RowFormat:
    """Return how the rows of a supervised command are read."""
    data = config.data
    match config:
        case SFTConfig():
            is_text = _if_given(config.model, "pretrain_mode_enable")
            return SFTFormat(**_answered(data), multiturn=data.multiturn, pretrain_mode=is_text)
        case KDConfig():
            return SFTFormat(**_answered(data), pretrain_mode=config.model.pretrain_mode_enable)
        case KTOConfig():
            return UnpairedFormat(**_answered(data), label_key=data.label_key)
        case RMConfig() | DPOConfig():
            return PreferenceFormat(
                prompt_key=_if_given(data, "prompt_key"),
                chosen_key=data.chosen_key,
                rejected_key=data.rejected_key,
                with_margin=isinstance(config, RMConfig) and config.model.margin_loss_enable,
                **_common(data, data.max_len, data.overlong_rows),
            )
        case PRMConfig():
            return ProcessFormat(
                input_key=_if_given(data, "input_key"),
                label_key=_if_given(data, "label_key"),
                placeholder_token=config.model.placeholder_token or "",
                reward_tokens=config.model.reward_tokens or (),
                **_common(data, data.max_len, data.overlong_rows),
            )
    raise AssertionError(type(config).__name__)


def scored_format(data: InferenceDataConfig) -> SFTFormat:
    """Return how rows with a response are read that a reward model scores."""
    return SFTFormat(**_answered(data))


def _answered(data: DatasetConfig) -> dict[str, Any]:
    """Return the fields of an `SFTFormat` that `data.*` says."""
    return {
        "input_key": _if_given(data, "input_key"),
        "output_key": _if_given(data, "output_key"),
        "usual_output": None if is_given(data, "output_key") else data.output_key,
        **_common(data, data.max_len, data.overlong_rows),
    }


def _common(data: TextDataConfig, max_len: int, overlong: str) -> dict[str, Any]:
    """Return the fields of a `RowFormat` of any kind."""
    return {
        "input_template": data.input_template,
        "apply_chat_template": _if_given(data, "apply_chat_template"),
        "max_len": max_len,
        "overlong": overlong,
        "allow_special_tokens": data.allow_special_tokens,
    }


def _if_given(settings: Base, name: str) -> Any:
    """Return a setting that somebody typed, or None."""
    return getattr(settings, name) if is_given(settings, name) else None


def ppo_data(config: PPOConfig) -> Iterator[DataSet]:
    """Yield prompts and, where they are named, those of the evaluation and pre-training text."""
    data, held_out, prompts = config.data, config.eval, config.data.prompt_dataset or ""
    check = prompt_format(data, data.label_key).find_columns
    shared = _shared_options(data, config.train.seed)
    options = {"split": data.prompt_split, "probs": data.prompt_probs, **_expected(data), **shared}
    yield DataSet(prompts, options, check)
    if held_out.dataset:
        is_training = (held_out.dataset, held_out.split) == (prompts, data.prompt_split)
        others = options if is_training else {"split": held_out.split, **shared}
        yield DataSet(held_out.dataset, others, check, EVALUATION)
    if data.pretrain_dataset and config.actor.ptx_coef != 0:
        options = {"split": data.pretrain_split, "probs": data.pretrain_probs, **shared}
        find = partial(pretrain_column, config)
        yield DataSet(data.pretrain_dataset, options, find, PRETRAIN)


def prompt_format(
    data: PPODataConfig | InferenceDataConfig, label_key: str | None = None
) -> PromptFormat:
    """Return how rows become prompts."""
    common = _common(data, data.prompt_max_len, data.overlong_prompts)
    return PromptFormat(input_key=_if_given(data, "input_key"), label_key=label_key, **common)


def pretrain_column(config: PPOConfig, rows: Dataset) -> str:
    """Return the column of the text in --pretrain_data; raise DataError when it is not there."""
    wanted = _if_given(config.data, "pretrain_key")
    return pick_columns(rows.column_names, (wanted, TEXT_COLUMNS, "--pretrain_key"))[0]


def inference_data(config: BatchInferenceConfig) -> DataSet:
    """Return the data set that is answered or scored."""
    data, is_scored = config.data, config.eval_task == "rm"
    form = scored_format(data) if is_scored else prompt_format(data)
    return _named_rows(data, form.find_columns, _shared_options(data, config.seed))
