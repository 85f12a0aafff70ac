"""What every task of batch_inference has: rows read and checked, and a key that names the work.

Knows no model: how an item becomes rows is said by the tasks.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.config.serving import BatchInferenceConfig
from openrlhf.datasets.chat import RENDERED
from openrlhf.datasets.command_data import inference_data
from openrlhf.datasets.problems import Gathered
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.errors import ConfigError
from openrlhf.models.loading import LoadOptions, is_value_model, load_config
from openrlhf.trainer.answer_parts import Rows
from openrlhf.utils.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig

Record = Callable[[Mapping[int, Rows]], None]  # keeps the rows of finished items
# Settings that change neither the rows nor their order.
FREE_SETTINGS = {"output_path", "local_rank", "micro_batch_size", "vllm", "reward"}


class BatchTask(ABC):
    """Items to work on, each by itself; made before a model is loaded."""

    notices: list[str]  # what a person should be told, one line each
    tokenizer: Tokenizer
    rows: Dataset

    def __init__(self, config: BatchInferenceConfig) -> None:
        """Read and check; of the ranks on a machine the one that goes first tokenises and shows it,
        the others read what it leaves in the cache.
        """
        path = config.model.model_name_or_path
        assert path is not None, "BatchInferenceConfig.check_what_is_needed_is_named"
        self.config = config
        self.model_path = path
        gathered, data = Gathered(), config.data
        facts = gathered.attempt(
            lambda: load_config(path, trust_remote_code=config.trust_remote_code)
        )
        if facts is not None:
            gathered.attempt(lambda: self._check_model(facts))
        tokenizer = gathered.attempt(
            lambda: load_tokenizer(
                path,
                chat_template=data.tokenizer_chat_template,
                use_fast=not data.disable_fast_tokenizer,
                trust_remote_code=config.trust_remote_code,
            )
        )
        rows = inference_data(config).read(gathered)
        if rows is not None and tokenizer is not None:
            self.rows, self.tokenizer = rows, tokenizer
            gathered.attempt(self._tokenise)
        gathered.raise_if_any()
        assert facts is not None, "or else problems were raised"
        self.model_config = facts

    def _check_model(self, facts: PretrainedConfig) -> None:
        """Raise ConfigError for a model that is to score and cannot."""
        if self.config.eval_task == "rm" and not is_value_model(facts):
            raise ConfigError(
                f"The model at {self.model_path!r} has no value head. Give a trained reward model."
            )

    @abstractmethod
    def _tokenise(self) -> None:
        """Make items of `rows`, with a bar; raises DataError."""

    @property
    @abstractmethod
    def items(self) -> range:
        """Indices of the items, in the order of their rows in the output."""

    @abstractmethod
    def row_id(self, item: int) -> int:
        """The row of the data that an item is made of."""

    def columns_of(self, item: int) -> dict[str, Any]:
        """The columns of an item's row, without bytes, which JSON cannot hold."""
        schema, row = self.rows.features.arrow_schema, self.rows[self.row_id(item)]
        return {name: row[name] for name in row if "binary" not in str(schema.field(name).type)}

    @property
    @abstractmethod
    def data_key(self) -> str:
        """A hash of the data, to notice that it changed."""

    @abstractmethod
    def work(self, mine: Sequence[int], record: Record, strategy: DeepSpeedStrategy) -> None:
        """Load the model and do this rank's items; all ranks call, also without any."""

    @property
    def key(self) -> str:
        """A hash of settings, model and data: with another one, other rows would come out."""
        settings = self.config.model_dump(mode="json", exclude=FREE_SETTINGS)
        facts = [settings, files_of_model(self.model_path), self.data_key]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def asked_columns(asked: Any) -> dict[str, Any]:
    """The columns of a prompt, which is a message list, or text as the model read it."""
    return {"input": asked, RENDERED: True} if isinstance(asked, str) else {"input": asked}


def load_options(config: BatchInferenceConfig) -> LoadOptions:
    """How the model is loaded."""
    ds = config.ds
    return LoadOptions(
        attn_implementation=ds.attn_implementation,
        dtype=ds.param_dtype,
        trust_remote_code=config.trust_remote_code,
        load_in_4bit=ds.load_in_4bit,
        experts_implementation=ds.experts_implementation,
    )


def files_of_model(model_path: str) -> list[list[object]]:
    """Name, size and time of the files of a local model; a loop may train into the same folder."""
    folder = Path(model_path).expanduser()
    files = sorted(path for path in folder.glob("*") if path.is_file()) if folder.is_dir() else []
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
