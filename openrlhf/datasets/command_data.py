"""The data sets that a command names, and how it reads their rows.

Files and columns are checked without a model or a tokenizer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from datasets import Dataset

from openrlhf.config.base import Base, is_given
from openrlhf.config.common import TextDataConfig
from openrlhf.config.generation import GenerationRunConfig, PromptDataConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.serving import BatchInferenceConfig
from openrlhf.config.supervised import DatasetConfig, SupervisedConfig
from openrlhf.datasets.loading import load_rows
from openrlhf.datasets.prompts_dataset import PromptDataset, StudentPrompts
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.datasets.tokenized import RowFormat, TokenizedDataset
from openrlhf.errors import Gathered
from openrlhf.utils.images import ImageProcessor
from openrlhf.utils.tokenizer import Tokenizer

# What stands before the problems of a data set.
TRAINING, EVALUATION, PRETRAIN = "", "evaluation: ", "--pretrain_data: "
RECOGNISED = {"input_key", "output_key", "label_key", "prompt_key", "apply_chat_template"}


@dataclass(frozen=True)
class DataSet:
    """A data set that a command names; nothing of it is read yet.

    Example: `DataSet("rows.jsonl", {"split": "train", "seed": 42, ...}, SFTDataset, RowFormat())`
    """

    spec: str
    options: Mapping[str, Any]  # of load_rows
    kind: type[TokenizedDataset]
    form: RowFormat
    about: str = TRAINING

    def read(self, gathered: Gathered) -> Dataset | None:
        """Return the rows, or None; note problems of files and columns."""
        rows = None
        with gathered.about(self.about):
            rows = load_rows(self.spec, **self.options)
            self.kind.find_columns(self.form, rows)
        return rows

    def tokenise(
        self,
        gathered: Gathered,
        rows: Dataset,
        tokenizer: Tokenizer,
        image_processor: ImageProcessor | None = None,
    ) -> Any:
        """Return the data set of the rows, or None; note problems of rows."""
        with gathered.about(self.about):
            return self.kind(rows, tokenizer, self.form, image_processor)
        return None


def supervised_data(
    config: SupervisedConfig, kind: type[TokenizedDataset], **more: Any
) -> Iterator[DataSet]:
    """Yield the training data and, where it is named, the evaluation data, of a recipe's `kind`;
    `more` are fields of their format. Of training data whose responses are sampled, prompts are
    read alone.
    """
    data, held_out = config.data, config.eval
    form, options = _answered_format(data, **more), partial(_options, data, config.train.seed)
    named = options(data.dataset_split) | _expected(data, data.dataset_probs)
    training = DataSet(data.dataset or "", named, kind, form)
    if config.num_sampled:  # there is room for one token at least
        asked = replace(form, max_len=data.max_len - 1)
        training = replace(training, kind=StudentPrompts, form=asked)
    yield training
    if held_out.dataset:
        yield DataSet(held_out.dataset, options(held_out.split), kind, form, EVALUATION)


def prompt_data(config: GenerationRunConfig) -> DataSet:
    """Return the prompts that get samples."""
    data = config.data
    options = _options(data, config.train.seed, data.prompt_split)
    has_agents = config.train.agent_func_path is not None
    form = _prompt_format(data, label_key=data.label_key, has_agents=has_agents)
    options |= _expected(data, data.prompt_probs)
    return DataSet(data.prompt_dataset or "", options, PromptDataset, form)


def ppo_data(config: PPOConfig) -> Iterator[DataSet]:
    """Yield prompts and, where they are named, those of the evaluation and pre-training text."""
    data, held_out, prompts = config.data, config.eval, prompt_data(config)
    options = partial(_options, data, config.train.seed)
    yield prompts
    if held_out.dataset:
        is_training = (held_out.dataset, held_out.split) == (prompts.spec, data.prompt_split)
        others = prompts.options if is_training else options(held_out.split)
        yield replace(prompts, spec=held_out.dataset, options=others, about=EVALUATION)
    if data.pretrain_dataset and config.actor.ptx_coef != 0:
        texts = options(data.pretrain_split) | {"probs": data.pretrain_probs}
        form = RowFormat(  # cut at the length of prompt and response together
            input_key=_if_given(data, "pretrain_key"),
            text_flag="--pretrain_key",
            pretrain_mode=True,
            max_images_per_prompt=0,
            max_len=config.total_len,
            overlong="truncate",
            allow_special_tokens=data.allow_special_tokens,
        )
        yield DataSet(data.pretrain_dataset, texts, SFTDataset, form, PRETRAIN)


def inference_data(config: BatchInferenceConfig) -> DataSet:
    """Return the data set whose prompts get responses, or whose responses are scored."""
    data = config.data
    options = _options(data, config.seed, data.dataset_split) | _expected(data, data.dataset_probs)
    kind: type[TokenizedDataset] = PromptDataset
    if config.eval_task == "rm":
        kind, form = SFTDataset, _answered_format(data)
    else:
        form = _prompt_format(data, label_key=None)
    return DataSet(data.dataset or "", options, kind, form)


def _answered_format(data: DatasetConfig, **more: Any) -> RowFormat:
    """Return the form of the rows of --dataset."""
    usual_output = None if is_given(data, "output_key") else data.output_key
    return _row_format(data, usual_output=usual_output, overlong=data.overlong_rows, **more)


def _prompt_format(data: TextDataConfig, **more: Any) -> RowFormat:
    """Return the form of rows that become prompts."""
    return _row_format(data, max_len=data.prompt_max_len, overlong=data.overlong_prompts, **more)


def _row_format(data: TextDataConfig, **more: Any) -> RowFormat:
    """Return a format with the settings of the same names; what rows themselves can tell is left
    open unless it is typed.
    """
    named = {field.name for field in fields(RowFormat)} & set(type(data).model_fields)
    typed = {name: _if_given(data, name) for name in named & RECOGNISED}
    told = {name: getattr(data, name) for name in named - RECOGNISED}
    return RowFormat(**(told | typed | more))


def _if_given(settings: Base, name: str) -> Any:
    """Return a setting that somebody typed, or None."""
    return getattr(settings, name) if is_given(settings, name) else None


def _options(data: DatasetConfig | PromptDataConfig, seed: int, split: str) -> dict[str, Any]:
    """Return the options of `load_rows` for a data set of a command."""
    may_be = {
        "repeated ids": data.duplicate_ids == "keep",
        "damaged records": data.bad_rows == "skip",
    }
    allowed = {what for what, is_allowed in may_be.items() if is_allowed}
    return {"split": split, "max_samples": data.max_samples, "seed": seed, "allowed": allowed}


def _expected(data: TextDataConfig, probs: str | None) -> dict[str, Any]:
    """Return the options of `load_rows` that are those of training data alone."""
    expected = {"expect_rows": data.expect_rows, "expect_sha256": data.expect_sha256}
    return {"probs": probs, **expected}
