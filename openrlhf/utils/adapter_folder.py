"""Folders that hold an adapter instead of a model: what base they name, without loading anything.

Whoever takes the path of a model asks here first; what can only work with whole weights refuses.
"""

import json
import os
from pathlib import Path
from typing import Any

from openrlhf.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
REWARD_TASK = "SEQ_CLS"


def base_of_adapter(path: str | os.PathLike[str]) -> str | None:
    """Return the model an adapter was trained on, as its folder names it; None for anything but
    an adapter's folder.

    Raises ConfigError where the folder names no base.
    """
    base = named_base(path)
    if base is None and read_adapter_config(path) is not None:
        raise ConfigError(
            f"{path} holds an adapter that does not say what it was trained on. Merge it: "
            f"{merge_command(path, 'BASE')}"
        )
    return base


def named_base(path: str | os.PathLike[str]) -> str | None:
    """Return the base that an adapter's folder names; None if it names none, or is no adapter's."""
    base = (read_adapter_config(path) or {}).get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


def adapter_below(path: str | os.PathLike[str]) -> str | None:
    """Return the adapter that the adapter in a folder was trained on; None if it was trained on a
    model, or names nothing.
    """
    base = named_base(path)
    return base if base is not None and read_adapter_config(base) is not None else None


def with_bases(path: str) -> list[str]:
    """Return the path and, of an adapter, the adapters that it was trained on and the model below
    them. Raises ConfigError where one of them is its own base.
    """
    found = [path]
    while (base := base_of_adapter(found[-1])) is not None:
        if base in found:
            raise ConfigError(f"{base} holds an adapter that is its own base. Copy it again.")
        found.append(base)
    return found


def whole_model(path: str) -> str:
    """Return the path, or that of the model below an adapter and those that it was trained on."""
    return with_bases(path)[-1]


def is_reward_adapter(path: str | os.PathLike[str]) -> bool:
    """Return True if a folder holds the adapter of a reward model, with its head."""
    settings = read_adapter_config(path)
    return settings is not None and settings.get("task_type") == REWARD_TASK


def refuse_adapter(path: str | os.PathLike[str], flag: str) -> None:
    """Raise ConfigError if a path whose weights an engine reads by itself holds an adapter."""
    base = base_of_adapter(path)
    if base is not None:
        raise ConfigError(
            f"{flag} {path} holds an adapter, and vLLM reads whole models. Merge it first: "
            f"{merge_command(path, base)}"
        )


def merge_command(path: str | os.PathLike[str], base: str) -> str:
    """Return the command that makes a model of an adapter."""
    kind = " --is_rm" if is_reward_adapter(path) else ""
    return f"openrlhf merge-lora --model_path {base} --lora_path {path} --output_path FOLDER{kind}"


def read_adapter_config(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the adapter's config in the folder; None if there is none."""
    file = Path(path).expanduser() / ADAPTER_CONFIG
    if not file.is_file():
        return None
    try:
        settings: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}. Save the adapter again.") from None
    return settings
