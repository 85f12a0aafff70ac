"""How transformers is made to load a model: with a bar of ours, without a report, and with its
refusals in one line.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import transformers

from openrlhf.errors import ConfigError, first_line
from openrlhf.utils.hub import looking_up
from openrlhf.utils.progress import bars_for_tqdm, progress

MIB = 2**20
# For weights in a .bin file transformers would ask a service of the hub to convert them.
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")


def would_run_code(file: str, names: str) -> str:
    """The line about pickled weights that name more than tensors."""
    return (
        f"{file} would run code when it is loaded: it names {names}. "
        "Do not use it; take the model from a source you trust, as safetensors."
    )


def refused_name(error: pickle.UnpicklingError) -> str:
    """What torch's restricted reader has stumbled over."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return found[1] if found else "more than tensors"


@contextmanager
def quiet_transformers(path: str) -> Iterator[None]:
    """Silence transformers' report of missing and unexpected keys, which are checked instead; what
    it refuses (an attention it has not, a package it lacks) and what is torn is a ConfigError.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - transformers reads files through it

    hook = bars_for_tqdm({"Loading weights": f"loading {Path(path).name}"})
    previous_hook = transformers.logging.set_tqdm_hook(hook)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with looking_up("model", path):
            yield
    except pickle.UnpicklingError as error:
        file = f"The file of weights in {path}"
        raise ConfigError(would_run_code(file, refused_name(error))) from error
    except (OSError, SafetensorError, EOFError, KeyError, RuntimeError) as error:
        is_pickled = any(Path(path).expanduser().glob("*_model*.bin"))
        if isinstance(error, (KeyError, RuntimeError)) and not is_pickled:
            raise
        raise ConfigError(
            f"The weights of {path} cannot be read: {first_line(error).rstrip('.')}. "
            "Copy or save them again."
        ) from error
    except (ImportError, ValueError) as error:
        reason = first_line(error).rstrip(".")
        raise ConfigError(f"The model cannot be loaded with these settings: {reason}") from error
    finally:
        transformers.logging.set_tqdm_hook(previous_hook)
        transformers.logging.set_verbosity(verbosity)


@cache
def download_bar_class() -> type:
    """What `from_pretrained` takes as `tqdm_class`: a bar of ours for each file of the hub."""
    from tqdm.std import tqdm  # noqa: PLC0415 - a dependency of transformers, used for downloads only

    class DownloadBar(tqdm):  # type: ignore[misc, type-arg]
        """Counts as tqdm does and draws nothing itself."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._open = ExitStack()
            self._num_shown = 0
            quiet = {"file": io.StringIO(), "disable": False, "leave": False, "mininterval": 0.0}
            super().__init__(*args, **{**options, **quiet})
            bar = progress(f"downloading {self.desc or 'files'} (MiB)".replace(": (", " ("))
            self._advance = self._open.enter_context(bar)

        def update(self, n: float | None = 1) -> bool | None:
            """See tqdm."""
            answer = super().update(n)
            num_done = int(self.n) // MIB
            total = int(self.total) // MIB if self.total else None
            self._advance(num_done - self._num_shown, total)
            self._num_shown = num_done
            return answer

        def display(self, *args: Any, **options: Any) -> bool:
            """Draw nothing."""
            return True

        def close(self) -> None:
            """See tqdm."""
            self._open.close()
            super().close()

    return DownloadBar
