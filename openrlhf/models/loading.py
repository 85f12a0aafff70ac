"""From a path or hub id to a Hugging Face model that runs on packed rows.

Every key of a checkpoint must find its place and every parameter its value; the one exception is a
value head put fresh on a model that never had one. Which attention a model gets is decided here.
"""

import copy
import json
import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto

from openrlhf.config.base import CommandConfig, value_at, walk
from openrlhf.config.common import DeepSpeedConfig, RunConfig
from openrlhf.config.local_paths import looks_local
from openrlhf.errors import ConfigError, Gathered, first_line
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import (
    SCALE_FIELDS,
    add_lora,
    merge_adapter_into,
    share_of_frozen_experts,
    would_run_code,
)
from openrlhf.models.own_numbers import check_own_numbers
from openrlhf.models.packing import PACKED_ATTENTION
from openrlhf.models.support import (
    OWN_ATTENTION,
    auto_class,
    causal_class,
    padding_note,
    refuse_unsupported,
)
from openrlhf.models.vision import place_tiles
from openrlhf.utils.adapter_folder import (
    adapter_below,
    base_of_adapter,
    is_reward_adapter,
    merge_command,
)
from openrlhf.utils.console import say_notices, warn_once
from openrlhf.utils.images import (
    ImageProcessor,
    is_vision,
)
from openrlhf.utils.packing import base_model_of
from openrlhf.utils.progress import progress, tracked
from openrlhf.utils.tensors import DTYPES
from openrlhf.utils.vision_families import FAMILIES
from openrlhf.utils.weight_files import files_of, tensor_shapes

HEAD = "score"  # the module transformers gives the scalar head
# Value models that OpenRLHF 0.8 to 0.11 saved: a backbone with one output, and no `num_labels`.
OPENRLHF_CLASSES = frozenset(("RewardModel", "CriticModel"))
# Keys without a place in a value model with a fresh head, and those of the head.
LANGUAGE_HEADS = rf"(lm_head|embed_out|output)(\.|$)|{HEAD}\.weight$"
DEFAULTS: Any = SimpleNamespace(ds=DeepSpeedConfig(), trust_remote_code=False)
# Families that read more than text.
OF_OTHER_MEDIA = frozenset(
    {
        *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
)
# What a class raises for a config that makes no model.
UNUSABLE = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
RANDOM = re.compile("dropout|drop_?prob|pdrop|layerdrop|jitter")  # attributes of modules
READING_CONFIG = ("falcon", "persimmon")  # families that read such rates in each forward pass
# For weights in a .bin file transformers would ask a service of the hub to convert them.
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")


def load_config(path: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the model's config; of an adapter's folder that of its base, with what the folder says
    of a head. Raise ConfigError if the path is no model.
    """
    if (base := base_of_adapter(path)) is not None:
        try:
            config = load_config(base, trust_remote_code=trust_remote_code)
        except ConfigError as error:
            raise ConfigError(f"The adapter at {path!r} lacks its base. {error}") from error
        if is_reward_adapter(path):
            config.num_labels = 1
            config.update({"value_head_prefix": HEAD, **_stored_head(path)})
        return config
    remedy = "Give a folder that save_pretrained wrote, or a hub id such as org/name."
    if looks_local(path) and not (Path(path).expanduser() / "config.json").is_file():
        raise ConfigError(f"Model path {path!r} holds no config.json. {remedy}")
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"Model {path!r} cannot be read: {first_line(error)} {remedy}") from error
    _refuse_other_media(config, path)
    return config


def _refuse_other_media(config: PretrainedConfig, path: str) -> None:
    """Raise ConfigError for a family that reads more than text, and is none of those that are
    trained: transformers would load some of them as language models, without their towers.
    """
    if is_vision(config):
        return
    has_tower = any(getattr(config, f"{tower}_config", None) for tower in ("vision", "audio"))
    has_tower |= any("audio" in name for name in config.sub_configs)
    if has_tower or config.model_type in OF_OTHER_MEDIA:
        raise ConfigError(
            f"Model {path!r} is of the family {config.model_type}, which reads images or sound and "
            f"is not supported. Take one of {', '.join(FAMILIES)}, or a model of texts alone."
        )


def read_configs(
    paths: Sequence[str],
    command: RunConfig,
    gathered: Gathered,
    *,
    has_router_loss: bool,
    scores: bool = False,
) -> dict[str, PretrainedConfig]:
    """Return the configs of models by path, of which the first is trained; note what forbids to
    read or use one.
    """
    found = {}
    for path in dict.fromkeys(paths):
        with gathered:
            found[path] = model_config = load_config(
                path, trust_remote_code=command.trust_remote_code
            )
            with gathered:
                check_shapes(model_config, path, command)
            if scores:
                with gathered:
                    refuse_pictures(model_config, path)
            refuse_unsupported(
                model_config,
                path,
                command.ds,
                has_token_budget=command.trains and command.train.dynamic_batch_enable,
                has_router_loss=has_router_loss and path == paths[0],
            )
    if paths[0] in found and command.ds.lora.rank:
        with gathered:
            check_adapter(found[paths[0]], command, scores=scores)
    return found


def image_processor_of(
    command: Any, path: str, config: PretrainedConfig | None
) -> ImageProcessor | None:
    """Return the image processor of a model, with the limits of the command's `data.*`; None of a
    model of texts. Raise ConfigError for settings of pictures that such a model cannot obey.
    """
    if config is None:
        return None
    if is_vision(config):
        return ImageProcessor.load(
            path,
            min_pixels=command.data.image_min_pixels,
            max_pixels=command.data.image_max_pixels,
            trust_remote_code=command.trust_remote_code,
        )
    leaves = (each for each in walk(type(command)) if re.search("image|visual", each.path))
    used = [leaf.flag for leaf in leaves if value_at(command, leaf.path)]
    if used:
        raise ConfigError(
            f"{', '.join(used)}: {path} reads no images, it is of the family "
            f"{config.model_type}. Leave {used[0]} out, or take a model of "
            f"{', '.join(FAMILIES)}."
        )
    return None


def policy_processor(command: Any) -> ImageProcessor | None:
    """Return the image processor of the policy of an RL command; None for one of texts alone."""
    path, trust = command.policy_path, command.trust_remote_code
    return image_processor_of(command, path, load_config(path, trust_remote_code=trust))


def refuse_pictures(config: PretrainedConfig, path: str) -> None:
    """Raise ConfigError for a model that reads pictures, where a value head would be put on it."""
    if is_vision(config):
        raise ConfigError(
            f"Reward models and critics read texts alone, and {path} reads images. Give rewards "
            "by --remote_rm_url, and take another --advantage_estimator than gae, as group_norm is."
        )


def check_engine_reads_pictures(config: PretrainedConfig, path: str, *, instead: str) -> None:
    """Raise ConfigError where vLLM lacks a package that it reads the images of a model through;
    `instead` is what to type in its place.
    """
    needed = FAMILIES[config.model_type].engine_packages if is_vision(config) else ()
    if lacks := [package for package in needed if not find_spec(package)]:
        raise ConfigError(
            f"vLLM reads the images of {path} through {lacks[0]}, which is not installed. Install "
            f"it, or type {instead}."
        )


def check_adapter(config: PretrainedConfig, command: CommandConfig, *, scores: bool) -> None:
    """Raise ConfigError for an adapter that does not fit the model; reads no weights."""
    model = empty_model(config, command, dtype=torch.float32, scores=scores)
    adapted = add_lora(model, command.ds.lora)
    if not scores:
        Actor(adapted)
    if (share := share_of_frozen_experts(adapted)) > 0:
        warn_once(
            f"--lora_rank: the experts of {type(model).__name__} take no adapter of PEFT's and "
            f"stay as they are: {share:.0%} of the weights."
        )


def empty_model(
    config: PretrainedConfig, command: CommandConfig, *, dtype: torch.dtype, scores: bool
) -> PreTrainedModel:
    """Return a model without weights, with a scalar head if it scores; raise ConfigError if there
    can be none.
    """
    kind = auto_class(config)
    if scores:
        kind, config = transformers.AutoModelForSequenceClassification, copy.deepcopy(config)
        config.num_labels, config.value_head_prefix = 1, HEAD
    try:
        with torch.device("meta"):
            trust = command.trust_remote_code
            return kind.from_config(config, dtype=dtype, trust_remote_code=trust)
    except UNUSABLE as error:
        raise ConfigError(
            f"The config.json of {config.name_or_path!r} makes no model: {type(error).__name__}: "
            f"{first_line(error)}. Copy the model again."
        ) from error


def check_shapes(config: PretrainedConfig, path: str, command: CommandConfig) -> None:
    """Raise ConfigError for a weight of another shape than the config gives it, before an engine
    meets it; in families whose weights are used as they stand in the files.
    """
    if not (shapes := _shapes_as_stored(config, path)):
        return
    model = empty_model(config, command, dtype=torch.float32, scores=False)
    for name, tensor in model.state_dict().items():
        if shapes.get(name, list(tensor.shape)) != list(tensor.shape):
            raise ConfigError(
                f"The weights at {path!r} do not fit the model: {name} has the shape "
                f"{shapes[name]}, and by config.json {list(tensor.shape)}. Give a complete "
                "checkpoint of this kind."
            )


def _shapes_as_stored(config: PretrainedConfig, path: str) -> Mapping[str, list[int]]:
    """Return the shape of every tensor in the files of a language model, by name; none where the
    model has other names for them, or the files are no safetensors.
    """
    is_stored_so = get_checkpoint_conversion_mapping(config.model_type) is None
    is_quantized = getattr(config, "quantization_config", None) is not None
    if causal_class(config) is None or is_quantized or not is_stored_so:
        return {}
    return tensor_shapes(Path(path).expanduser())


def _stored_head(path: str) -> dict[str, object]:
    """Return the name of the head and scale of its scores, as they stand beside a reward model's
    adapter.
    """
    file = Path(path).expanduser() / "config.json"
    stored = json.loads(file.read_text()) if file.is_file() else {}
    return {name: stored[name] for name in ("value_head_prefix", *SCALE_FIELDS) if name in stored}


def default_device_type() -> str:
    """Return the kind of device that models of this process run on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_dtype(
    param_dtype: str, config: PretrainedConfig, *, device_type: str | None = None
) -> torch.dtype:
    """Return the type of `bf16|fp16|fp32|auto`; auto is fp32 on CPU, the checkpoint's own on a
    GPU.
    """
    if param_dtype != "auto":
        return DTYPES[param_dtype]
    if (device_type or default_device_type()) == "cpu":
        return torch.float32
    dtype = config.dtype if config.dtype is not None else config.get_text_config().dtype
    return dtype if dtype is not None else torch.float32


def _options(path: str, config: PretrainedConfig, command: CommandConfig) -> dict[str, Any]:
    """Return the arguments that make transformers load a model for packed rows, or for
    padded ones.
    """
    ds = command.ds
    dtype = resolve_dtype(ds.param_dtype, config)
    attention: str | None = ds.attention
    if attention in OWN_ATTENTION:
        eager = "eager" if attention == "eager" else None  # None: what transformers takes
        attention = PACKED_ATTENTION if padding_note(config, path) is None else eager
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if is_vision(config) and attention == PACKED_ATTENTION:  # a tower is not causal
        options["attn_implementation"] = {
            **dict.fromkeys(("", "text_config"), attention),
            "vision_config": "sdpa",
        }
    if ds.experts_implementation is not None:
        options["experts_implementation"] = ds.experts_implementation
    if ds.load_in_4bit:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return options | {"trust_remote_code": command.trust_remote_code}


def read_model(
    auto_class: Any,
    path: str,
    config: PretrainedConfig,
    command: CommandConfig,
    *,
    ignored: str = "(?!)",  # matches nothing
    **more: object,
) -> PreTrainedModel:
    """Return a model with all its weights in place; raise ConfigError for weights that cannot be
    read, or are not those of the model. Names of keys that match `ignored` may be anything.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - transformers reads files through it

    more |= _options(path, config, command)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # keys are checked instead of printed
    try:
        with progress(f"loading {Path(path).name}"):
            model, info = auto_class.from_pretrained(
                path,
                config=config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are an error below
                **more,
            )
    except pickle.UnpicklingError as error:
        raise ConfigError(would_run_code(f"The file of weights in {path}", error)) from error
    except (OSError, SafetensorError, ImportError, ValueError) as error:
        raise ConfigError(
            f"The weights of {path} cannot be read: {first_line(error).rstrip('.')}. "
            "Copy or save them again, or leave out the setting that this names."
        ) from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    _check_keys(path, info, ignored)
    for module in model.modules():
        # In evaluation bitsandbytes (0.50) repacks a CPU's 4-bit weights for a kernel without a
        # backward pass and never turns back: gradients would miss the path through the base.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    own_memory(model)
    check_finite(model, path)
    place_tiles(model)
    if command.ds.use_liger_kernel:
        from liger_kernel import transformers as liger  # noqa: PLC0415 - imports Triton

        # Its loss kernels would replace the model's forward pass; the head here works in chunks.
        liger._apply_liger_kernel_to_instance(
            model=model, cross_entropy=False, fused_linear_cross_entropy=False
        )
    return model


def _check_keys(path: str, info: Mapping[str, Any], ignored: str) -> None:
    problems = {
        "missing": {key for key in info["missing_keys"] if not re.match(ignored, key)},
        "unexpected": {key for key in info["unexpected_keys"] if not re.match(ignored, key)},
        "of another shape": {key for key, *_ in info["mismatched_keys"]},
    }
    texts = [
        f"{len(keys)} keys are {kind} ({', '.join(sorted(keys)[:3])})"
        for kind, keys in problems.items()
        if keys
    ]
    if texts:
        raise ConfigError(
            f"The weights at {path!r} do not fit the model: {'; '.join(texts)}. "
            "Give a complete checkpoint of this kind."
        )


def load_causal_lm(
    path: str | os.PathLike[str],
    command: CommandConfig = DEFAULTS,
    *,
    base: str | None = None,
) -> PreTrainedModel:
    """Load a causal language model for packed rows; raise ConfigError for wrong or missing weights.

    The folder of an adapter gives `base`, by default the one it names, with the adapter merged.
    """
    path = os.fspath(path)
    if (base := base or _base_to_merge_into(path, command)) is not None:
        if is_reward_adapter(path):
            raise ConfigError(
                f"{path} holds the adapter of a reward model. Give a language model or its adapter."
            )
        return merge_adapter_into(load_causal_lm(base, command), path)
    config = load_config(path, trust_remote_code=command.trust_remote_code)
    model = read_model(auto_class(config), path, config, command)
    if command.ds.attention in OWN_ATTENTION:
        check_own_numbers(model)
    return model


def load_sequence_model(
    path: str | os.PathLike[str],
    command: CommandConfig = DEFAULTS,
    *,
    value_head_prefix: str | None = None,
    allow_fresh_head: bool = True,
    base: str | None = None,
) -> PreTrainedModel:
    """Load a model with one scalar head: its own, or a fresh one on a causal language model.

    The head is the module named `config.value_head_prefix`. With the default name `score` a saved
    model loads in AutoModelForSequenceClassification(num_labels=1) as it is. The folder of an
    adapter, with a head or without, gives `base`, by default the one it names, with the adapter
    merged.
    """
    path = os.fspath(path)
    if (base := base or _base_to_merge_into(path, command)) is not None:
        stored = _stored_head(path)
        model = load_sequence_model(
            base,
            command,
            value_head_prefix=stored.pop("value_head_prefix", value_head_prefix),
            allow_fresh_head=allow_fresh_head or is_reward_adapter(path),
        )
        model.config.update(stored)
        return merge_adapter_into(model, path)
    config = load_config(path, trust_remote_code=command.trust_remote_code)
    refuse_pictures(config, path)
    if allow_fresh_head:
        refuse_other_heads(config, path)
    else:
        check_value_model(config, path)
    has_stored_head = is_value_model(config)
    if _is_classifier(config) and config.num_labels != 1:
        raise ConfigError(
            f"The model at {path!r} has {config.num_labels} labels; a value head has one."
        )
    config.num_labels = 1
    stored_name = config.to_dict().get("value_head_prefix")
    config.value_head_prefix = name = (
        stored_name or value_head_prefix or command.ds.value_head_prefix
    )
    more = {"key_mapping": {rf"^{re.escape(name)}\.": f"{HEAD}."}} if name != HEAD else {}
    if not has_stored_head:
        more["ignored"] = LANGUAGE_HEADS
    model = read_model(
        transformers.AutoModelForSequenceClassification, path, config, command, **more
    )
    if not has_stored_head:
        init_value_head(model.get_submodule(HEAD))
    if command.ds.attention in OWN_ATTENTION:
        check_own_numbers(model, scores=True)
    if name != HEAD:  # the name it has in saved files
        model.add_module(name, model.get_submodule(HEAD))
        delattr(model, HEAD)
    return model


def _base_to_merge_into(path: str, command: CommandConfig) -> str | None:
    """Return the base of the adapter at `path`, or None; raise ConfigError if it is to be loaded in
    4 bits, to which merged weights would be rounded once more.
    """
    base = base_of_adapter(path)
    if base is not None and command.ds.load_in_4bit:
        raise ConfigError(
            f"--load_in_4bit: {path} holds an adapter, and merging rounds 4-bit weights again. "
            f"Merge it first: {merge_command(path, base)}"
        )
    return base


def say_padded(command: CommandConfig, paths: Iterable[str]) -> None:
    """Say which of the models at `paths` see padded rows; the main rank calls."""
    trust = command.trust_remote_code
    notes = (padding_note(load_config(path, trust_remote_code=trust), path) for path in paths)
    say_notices(filter(None, notes))


def merge_adapter(
    base_path: str, adapter_path: str, command: CommandConfig, *, is_rm: bool
) -> PreTrainedModel:
    """Return the base with the adapter's weights added, as a plain Hugging Face model.

    A reward model gets its head and its scale from the adapter's folder. Raises ConfigError as
    `load_adapter` does.
    """
    has_head = is_reward_adapter(adapter_path)
    if has_head != is_rm:  # the head would be lost, or is not there
        kind, remedy = ("a", "Type") if has_head else ("no", "Leave out")
        raise ConfigError(f"{adapter_path} is {kind} reward model's adapter. {remedy} --is_rm.")
    below = adapter_below(adapter_path)
    if below is not None and _place(below) != _place(base_path):
        raise ConfigError(
            f"{adapter_path} was trained on {below}, which is an adapter itself and would be left "
            f"out. Type --model_path {below}."
        )
    load = load_sequence_model if is_rm else load_causal_lm
    merged = load(adapter_path, command, base=base_path)
    merged.name_or_path = merged.config._name_or_path = base_path
    return merged


def _place(path: str) -> Path:
    return Path(path).expanduser().resolve()


def own_memory(model: PreTrainedModel) -> None:
    """Copy weights that stay on the CPU out of the mapped file they are views of.

    A file puts them at any offset, which changes the last bits of a product from file to file, and
    a checkpoint written over the mapped file would change them.
    """
    if default_device_type() != "cpu":
        return
    for parameter in tracked(list(model.parameters()), "copying weights into memory"):
        parameter.data = parameter.data.clone()


def check_finite(model: PreTrainedModel, path: str) -> None:
    """Raise ConfigError for weights that are no numbers."""
    for name, parameter in model.named_parameters():
        _check_numbers(parameter, name, path)


def check_files(config: PretrainedConfig, path: str, command: CommandConfig) -> None:
    """Raise ConfigError for weights that are missing in the safetensors files of a folder, or are
    no numbers: an engine reads them by itself, and some of vLLM's models do without.
    """
    from safetensors import safe_open  # noqa: PLC0415 - as above

    if shapes := _shapes_as_stored(config, path):
        model = empty_model(config, command, dtype=torch.float32, scores=False)
        named = {name for name, _ in model.named_parameters()} - {*model.all_tied_weights_keys}
        missing = sorted(named - shapes.keys())
        passed_over = ["rotary_emb.inv_freq", *(model._keys_to_ignore_on_load_unexpected or ())]
        unknown = shapes.keys() - model.state_dict().keys()
        unknown -= {name for name in unknown if re.search("|".join(passed_over), name)}
        if missing and not unknown:  # else some may be there under other names
            raise ConfigError(
                f"The weights at {path!r} do not fit the model: {len(missing)} are missing, such "
                f"as {missing[0]}. Give a complete checkpoint."
            )
    for file in tracked(files_of(Path(path).expanduser()), "looking at weights"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                _check_numbers(opened.get_tensor(name), name, path)


def _check_numbers(tensor: Tensor, name: str, path: str) -> None:
    # Those in 8 bits are scaled, and have no such test. A single number is a constant, such as the
    # -inf of masks. The two ends, NaN where there is one, take a tenth of a test of each number.
    if not tensor.is_floating_point() or tensor.itemsize == 1 or not tensor.dim():
        return
    if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
        raise ConfigError(
            f"The weights at {path!r} hold NaN or infinity ({name}). Give a checkpoint from "
            "before the run that wrote them failed."
        )


def is_value_model(config: PretrainedConfig) -> bool:
    """Return True for a checkpoint with a scalar head, which must then be found in it."""
    has_own_class = OPENRLHF_CLASSES.intersection(config.architectures or ())
    return bool(has_own_class) or _is_classifier(config) or "value_head_prefix" in config.to_dict()


def check_value_model(config: PretrainedConfig, path: str) -> None:
    """Raise ConfigError for a checkpoint without a scalar head."""
    if not is_value_model(config):
        remedy = "Give a reward model, such as openrlhf rm makes."
        raise ConfigError(f"{path} has no value head. {remedy}")
    refuse_other_heads(config, path)


def refuse_other_heads(config: PretrainedConfig, path: str) -> None:
    """Raise ConfigError for a family of classifiers that read a text as a whole, such as BERT."""
    mapping = transformers.AutoModelForSequenceClassification._model_mapping
    if type(config) not in mapping:
        return
    if not hasattr(empty_model(config, DEFAULTS, dtype=torch.float32, scores=True), HEAD):
        raise ConfigError(
            f"{path} is of the family {config.model_type}, whose classifiers are no causal "
            "language models with a scalar head. Give rewards of it by --remote_rm_url with a "
            "function or a server of your own."
        )


def _is_classifier(config: PretrainedConfig) -> bool:
    """Return True for a sequence classifier of transformers; it may have several labels."""
    return any("SequenceClassification" in name for name in config.architectures or ())


def init_value_head(head: nn.Linear) -> None:
    """Draw a fresh head with std 1 / (hidden + 1) from its own generator: equal on every rank."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(head.weight.shape, generator=generator)
    with torch.no_grad():
        head.weight.copy_(draw / (head.weight.size(-1) + 1))


def disable_dropout(model: nn.Module) -> None:
    """Switch dropout and the noise of routers off: RL compares log-probs of the same weights, in
    training mode too. Families keep the rates in many places. Raise ConfigError where that is not
    possible.
    """
    config = base_model_of(model).config
    if config.model_type == "phimoe":  # its noise is a threshold, too
        raise ConfigError(
            "phimoe draws experts at random in training: log-probs of the same weights differ. "
            "Take a model of another family."
        )
    read = [config] if config.model_type in READING_CONFIG else []
    for part in (*model.modules(), *read):
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for name, value in vars(part).items():
            if isinstance(value, float) and RANDOM.search(name):
                setattr(part, name, 0.0)
