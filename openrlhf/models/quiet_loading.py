"""How transformers is made to load a model: without a report, and with its refusals in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import transformers

from openrlhf.errors import ConfigError


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' report of missing and unexpected keys, which are checked instead; what
    it refuses (an attention it has not, a package it lacks) is a ConfigError.
    """
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    except (ImportError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"The model cannot be loaded with these settings: {reason}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
