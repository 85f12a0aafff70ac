"""Trained models on the Hugging Face hub, through its own client: the files of the model alone,
never the records or samples of the run.
"""

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

from openrlhf.config.serving import PushConfig
from openrlhf.distributed.checkpoints import find_model
from openrlhf.distributed.export import MARKERS
from openrlhf.distributed.folders import MODEL_FILES, WEIGHT_FILES
from openrlhf.errors import CheckpointError, ConfigError, first_line
from openrlhf.utils.console import notice
from openrlhf.utils.progress import progress

T = TypeVar("T")


def open_repository(name: str) -> None:
    """Make a private repository on the hub, unless it is there; raise ConfigError where that
    fails.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 - for a push alone

    problem = _attempt(lambda: HfApi().create_repo(name, private=True, exist_ok=True))
    if problem:
        raise ConfigError(
            f"--push_to_hub {name} cannot be written: {problem}. Type org/name of a repository "
            "that the token in HF_TOKEN may write, or leave --push_to_hub out."
        )


def push(folder: Path, name: str) -> None:
    """Upload the model in a folder as one commit; raise CheckpointError where that fails."""
    from huggingface_hub import (  # noqa: PLC0415 - as above
        CommitOperationAdd,
        CommitOperationDelete,
        HfApi,
        constants,
    )

    found = sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)})
    files = {path.name: path for path in found if path.is_file()}

    def commit() -> None:
        # Of an earlier model: an adapter's config or an index would be read before these files.
        stale = [file for file in HfApi().list_repo_files(name) if file not in files]
        gone = [file for file in stale if any(fnmatch(file, pattern) for pattern in WEIGHT_FILES)]
        HfApi().create_commit(
            name,
            [
                *(CommitOperationAdd(file, path) for file, path in files.items()),
                *(CommitOperationDelete(file) for file in gone),
            ],
            commit_message="Add model",
        )

    with progress(f"pushing to {name}"):
        problem = _attempt(commit)
    if problem:
        raise CheckpointError(
            f"the model is in {folder}, and was not pushed to {name}: {problem}. Type openrlhf "
            f"push {folder} --push_to_hub {name} to try again."
        )
    notice(f"model pushed to {constants.ENDPOINT}/{name}")


def run_push(config: PushConfig) -> None:
    """Upload the model that is named, or that of a run."""
    assert config.model and config.push_to_hub, "they are needed"
    folder = Path(find_model(config.model))
    if not any((folder / file).is_file() for file in MARKERS):
        raise ConfigError(f"{config.model} is no folder of a model. Type one, or that of a run.")
    open_repository(config.push_to_hub)
    push(folder, config.push_to_hub)


def _attempt(request: Callable[[], object]) -> str:
    """Return the reason why a request failed; empty where it did not."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # noqa: PLC0415

    try:
        request()
    except (OSError, ValueError, HTTPError) as error:  # of the client, and of its HTTP library
        return str(getattr(error, "server_message", None) or first_line(error)).rstrip(".")
    return ""
