"""Models and data sets of hubs, before anything reads them.

Ids of ModelScope (--use_ms) become the folders of their snapshots, which its own library fetches.
Ids of the Hugging Face hub stay, and a hub that does not answer is said once.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TypeVar

from openrlhf.config.base import CommandConfig, with_value
from openrlhf.config.common import TrainingRunConfig
from openrlhf.config.local_paths import is_hub_id, named_things
from openrlhf.errors import ConfigError, first_line

ConfigT = TypeVar("ConfigT", bound=CommandConfig)
HUB_TIMEOUT_S = 10.0  # for its first answer


def library_problems(config: CommandConfig) -> Iterator[str]:
    """Yield a line for each optional library that is asked for and not there."""
    asked = {"modelscope": ("--use_ms", config.use_ms)}
    if isinstance(config, TrainingRunConfig):
        asked["trackio"] = ("--use_trackio", config.logger.trackio)
        asked["mlflow"] = ("--use_mlflow", config.logger.mlflow)
    for library, (flag, is_asked) in asked.items():
        if is_asked and find_spec(library) is None:
            yield (
                f"{flag} is set, and the library {library} is not installed. Type pip install "
                f"'.[{library}]' in the checkout, or leave {flag} out."
            )


def with_snapshots(config: ConfigT, *, is_shown: bool) -> ConfigT:
    """Put the folder of its snapshot in the place of every id of ModelScope, with a bar while files
    come; raise ConfigError that lists the ids that cannot be had. Ask the Hugging Face hub whether
    it answers, where it has ids.
    """
    ids = [
        name for _, opens, names in named_things(config) for name in names if is_hub_id(opens, name)
    ]
    if ids and not config.use_ms:
        _ask_hub(ids, is_shown=is_shown)
    problems = []
    for option, opens, names in named_things(config) if config.use_ms else ():
        before = list(names)
        for index, name in enumerate(before):
            if is_hub_id(opens, name):
                kind = "dataset" if opens == "data" else "model"
                try:
                    names[index] = _snapshot(name, kind, is_shown=is_shown)
                except ConfigError as error:
                    problems.append(f"{option.flag} {error}")
        if names != before:
            config = with_value(config, option.path, ",".join(names))
    if problems:
        raise ConfigError(problems)
    return config


def _ask_hub(ids: Sequence[str], *, is_shown: bool) -> None:
    """Make this process and its children read caches only, if the Hugging Face hub does not answer:
    its library would try again for each file, half a minute at a time.
    """
    from huggingface_hub import constants, get_session  # noqa: PLC0415 - it would slow --help
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # noqa: PLC0415

    from openrlhf.utils.console import warn  # noqa: PLC0415 - rich would slow --help
    from openrlhf.utils.progress import progress  # noqa: PLC0415

    if constants.is_offline_mode():
        return
    try:
        with progress(f"asking {constants.ENDPOINT}", is_shown=is_shown):
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except (OSError, HTTPError) as error:  # of whichever HTTP client the library uses
        if is_shown:
            warn(
                f"{constants.ENDPOINT} does not answer ({first_line(error)}): {', '.join(ids)} can "
                "only come from this machine's cache"
            )
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        if (datasets := sys.modules.get("datasets")) is not None:
            datasets.config.HF_HUB_OFFLINE = True


def _snapshot(name: str, kind: str, *, is_shown: bool) -> str:
    """Fetch all files of an id, or of `id@subset`, and return their folder."""
    from modelscope import snapshot_download  # noqa: PLC0415 - for --use_ms alone
    from modelscope_hub.errors import HubError  # noqa: PLC0415

    from openrlhf.utils.progress import progress  # noqa: PLC0415 - rich would slow --help

    logging.getLogger("modelscope_hub").setLevel(logging.WARNING)  # it says each step
    repository, at, subset = name.partition("@")
    try:
        with progress(f"fetching {repository}", is_shown=is_shown):
            return snapshot_download(repo_id=repository, repo_type=kind) + at + subset
    except (HubError, OSError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be fetched from ModelScope: {first_line(error)}. Type the id of a "
            f"{'data set' if kind == 'dataset' else kind} there, or a local path."
        ) from error
