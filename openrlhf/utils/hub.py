"""The hub that models, tokenizers and data sets come from: what happens where it does not answer.

The hub's own client tries each file again and again, for a minute in all. Here it has 10
seconds; where it does not answer, only its cache is used from then on, in this process and in those
it starts.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from openrlhf.errors import ConfigError
from openrlhf.utils.logging import warn_once

UNREACHABLE = "OPENRLHF_HUB_UNREACHABLE"  # why, for processes that are started later


@contextmanager
def looking_up(kind: str, name: str) -> Iterator[None]:
    """Around work that reads `name` from the hub: one ConfigError where it can be had neither there
    nor from the cache. Work on a folder or file passes untouched.
    """
    if os.path.exists(os.path.expanduser(name)):
        yield
        return
    reason = why_unreachable()
    try:
        yield
    except OSError as error:
        if reason is None:
            raise
        raise ConfigError(
            f"{kind} {name} is neither here nor in the hub's cache, and {reason}. Type the path of "
            "a local copy, set HF_ENDPOINT to a hub that answers, or HF_HOME to a cache that has "
            "it (with HF_HUB_OFFLINE=1 nothing is waited for)."
        ) from error
    if reason is not None and UNREACHABLE in os.environ:
        warn_once(f"{reason}: what is in its cache is used.")


@cache
def why_unreachable() -> str | None:
    """Return why the hub cannot be used, or None. Asked once in the life of a process.

    Where it does not answer, the libraries of this process and of its children use the cache alone.
    """
    from huggingface_hub import constants  # noqa: PLC0415 - for hub ids alone

    if constants.HF_HUB_OFFLINE:
        return os.environ.get(UNREACHABLE, "HF_HUB_OFFLINE is set")
    trouble = _ask(constants.ENDPOINT, float(constants.HF_HUB_ETAG_TIMEOUT))
    if trouble is None:
        return None
    reason = f"the hub at {constants.ENDPOINT} does not answer ({trouble})"
    os.environ |= {"HF_HUB_OFFLINE": "1", UNREACHABLE: reason}
    constants.HF_HUB_OFFLINE = True
    # It copies the switch when it is imported.
    if (config := sys.modules.get("datasets.config")) is not None:
        vars(config)["HF_HUB_OFFLINE"] = True
    return reason


def _ask(endpoint: str, limit_s: float) -> str | None:
    """Return what went wrong with a request to the hub; None after an answer of any kind."""
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=limit_s).close()
    except urllib.error.HTTPError:  # e.g. redirects without end: an answer
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return f"nothing within {limit_s:g} s; HF_HUB_ETAG_TIMEOUT gives it more"
        # The hub's client may know a certificate that is unknown here.
        is_unknown = isinstance(reason, ssl.SSLError)
        return None if is_unknown else str(reason) or type(reason).__name__
    return None
