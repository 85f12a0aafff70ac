"""The GPUs that this machine shows, a check that torch can use them, and the memory a process took.

Torch is imported late: some who ask change the choice before any library looks at it.
"""

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.errors import ConfigError, first_line

if TYPE_CHECKING:
    import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDDEN = "-1"  # among its names: no GPU


def gpus_of_machine() -> list[str]:
    """Return the numbers of the GPUs in /dev, without a library of theirs."""
    files = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return [str(number) for number in range(len(files))]


def visible_gpus(env: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the GPUs that this process may use: those chosen, else all in /dev."""
    chosen = (os.environ if env is None else env).get(VISIBLE)
    names = gpus_of_machine() if chosen is None else chosen.split(",")
    return [name for name in names if name and name != HIDDEN]


def check_gpus() -> None:
    """Raise ConfigError if this machine has GPUs that are not hidden and torch cannot use."""
    if gpus_of_machine() and (names := visible_gpus()):
        check_torch_uses(names, f"this machine has {len(names)} GPU(s)")


def check_torch_uses(names: list[str], who: str) -> None:
    """Raise ConfigError if there are GPUs and torch sees none: all would run on the CPU, unsaid."""
    import torch  # noqa: PLC0415 - see above

    if not names or torch.cuda.is_available():
        return
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter of a build without CUDA
        reason = first_line(error).partition(". ")[0]
        raise ConfigError(
            f"{who}, and torch {torch.__version__} cannot use them: {reason}. Install a CUDA build "
            "of torch and an NVIDIA driver >= 580, or set CUDA_VISIBLE_DEVICES= (for `ray start` "
            "too) to run on the CPU."
        ) from error


def peak_memory_gib(device: "torch.device") -> float:
    """Return the most memory this process has held so far: of its GPU, or of the machine."""
    import torch  # noqa: PLC0415 - see above

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # in KiB
