"""Where the chatter of vLLM, Ray and DeepSpeed goes: files in the run folder, whose last lines are
read where a process is lost. They are known by the names of their loggers and switches.
"""

import itertools
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from openrlhf.utils.console import LOGGER
from openrlhf.utils.run_folder import LOGS

VLLM_LOGGING = "VLLM_LOGGING_CONFIG_PATH"  # which vLLM reads as it is imported
LINE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

FRAMEWORK_LOGGERS = (
    *("vllm", "ray", "DeepSpeed", "transformers", "datasets", "matplotlib", "py.warnings"),
)

FRAMEWORK_SWITCHES = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # No telemetry: nothing about a run leaves the machine unless the user asks for it.
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

NUM_LINES = 3  # of a log
END_OF_LOG = ". The end of "
# Lines of Ray and of vLLM about what goes well.
NOISE = re.compile(r"\[[^\]]* [DIW] \d+ \d+\]|:\w+:|\S+ \S+ (DEBUG|INFO) ")

# What libraries warn of at each import: no GPU is here, a kernel nobody asked for is not installed.
FALSE_ALARMS = {
    "DeepSpeed": "Setting accelerator to CPU",
    "bitsandbytes.backends.cpu.ops": "gemm_4bit_forward",
}


class _LogFile(logging.FileHandler):
    """A log that only its process closes. Libraries that configure logging close all handlers there
    are, and a handler opens its file anew, whose folder may have been removed since.
    """

    def close(self) -> None:
        """Leave the file open."""


class _FileOnlyLogger(logging.Logger):
    """A logger that keeps the handlers it has; libraries add console handlers on a late import."""

    def addHandler(self, hdlr: logging.Handler) -> None:
        """Ignore the handler."""


def quiet_frameworks() -> None:
    """Switch the frameworks' bars and telemetry off, where the user has not decided otherwise.

    Most read their switches when they are imported: call it before.
    """
    for name, value in FRAMEWORK_SWITCHES.items():
        os.environ.setdefault(name, value)
    for name in FALSE_ALARMS:
        logging.getLogger(name).addFilter(_is_no_false_alarm)


def _is_no_false_alarm(record: logging.LogRecord) -> bool:
    return FALSE_ALARMS[record.name] not in record.getMessage()


def new_log(run_dir: Path | str, role: str) -> Path:
    """Make the log of a role's next attempt, which no other process is given: `logs/actor.log`,
    then `logs/actor.attempt1.log`.
    """
    folder = Path(run_dir, LOGS)
    folder.mkdir(parents=True, exist_ok=True)
    for attempt in itertools.count():
        path = folder / (f"{role}.attempt{attempt}.log" if attempt else f"{role}.log")
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    raise AssertionError("unreachable")


def redirect_framework_logs(
    run_dir: Path | str, role: str, *, capture_streams: bool = False
) -> Path:
    """Send what vLLM, Ray, DeepSpeed and Python warnings say to a file, from children too.

    Every call is an attempt with a file of its own. Call it early; a library imported before or
    after it is caught alike. `capture_streams` also points this process' stdout and stderr at the
    file: for workers, whose native code prints too. Return the file.
    """
    path = new_log(run_dir, role)
    quiet_frameworks()
    os.environ[VLLM_LOGGING] = str(_write_vllm_config(path))
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(LINE_FORMAT))
    logging.captureWarnings(capture=True)
    for name in FRAMEWORK_LOGGERS:
        _keep_in_file(name, handler)
    LOGGER.handlers = [handler]
    if capture_streams:
        _capture_streams(path)
    return path


@contextmanager
def put_back() -> Iterator[None]:
    """Put warnings and the frameworks' loggers back as they were: a program goes on after a run."""
    loggers = [logging.getLogger(name) for name in FRAMEWORK_LOGGERS]
    before = [(each.__class__, each.handlers, each.propagate) for each in loggers]
    showing, vllm = warnings.showwarning, os.environ.get(VLLM_LOGGING)
    try:
        yield
    finally:
        for logger, (kind, handlers, propagate) in zip(loggers, before, strict=True):
            logger.__class__, logger.handlers, logger.propagate = kind, handlers, propagate
        if warnings.showwarning is not showing:
            logging.captureWarnings(capture=False)
        os.environ.pop(VLLM_LOGGING, None)
        os.environ.update({} if vllm is None else {VLLM_LOGGING: vllm})


def _keep_in_file(name: str, handler: logging.Handler) -> None:
    """Make `handler` the only one of this logger, for good."""
    logger = logging.getLogger(name)
    logger.handlers = [handler]
    logger.propagate = False
    if name != "vllm":  # vLLM configures itself from the file given in VLLM_LOGGING
        logger.__class__ = _FileOnlyLogger


def _write_vllm_config(path: Path) -> Path:
    """A logging configuration that vLLM's own processes read too; beside the log file."""
    handler = {
        "class": "logging.FileHandler",
        "filename": str(path.resolve()),
        "encoding": "utf-8",
        "formatter": "line",
    }
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": LINE_FORMAT}},
        "handlers": {"file": handler},
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
    config_path = path.with_suffix(".vllm.json")
    config_path.write_text(json.dumps(config))
    return config_path


def _capture_streams(path: Path) -> None:
    """Point file descriptors 1 and 2 at the file, below Python, so that native prints follow."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def latest_log(log: str) -> Path | None:
    """Return the log that was written to last of those whose names begin so."""
    written: dict[Path, float] = {}
    for file in Path(log).parent.glob(f"{Path(log).name}.*log") if log else ():
        with suppress(OSError):  # it is gone meanwhile
            written[file] = file.stat().st_mtime
    return max(written, key=written.__getitem__, default=None)


def text_of(path: Path | None) -> str:
    """Return the text of a log; empty without one."""
    try:
        return path.read_text(errors="replace") if path else ""
    except OSError:
        return ""


def last_lines(path: Path | None) -> str:
    """Return the end of a log as the end of a sentence; empty without any."""
    lines = [line.strip() for line in text_of(path).splitlines()]
    told = " | ".join([line for line in lines if line and not NOISE.match(line)][-NUM_LINES:])
    return f"{END_OF_LOG}{path}: {told}" if told else ""


def with_last_lines(said: str, log: str) -> str:
    """Return a sentence about a lost process with the end of its log, once; `log` begins the names
    of its logs.
    """
    return said if END_OF_LOG in said else f"{said}{last_lines(latest_log(log))}"
