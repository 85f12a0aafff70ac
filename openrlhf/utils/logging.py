"""Everything the package says on the console, and where the frameworks' own chatter goes.

Plain lines, on a terminal and elsewhere; bars are in progress.py. The text of the step line and of
the hints is made by pure functions of metrics; the names are the logged names.
vLLM, Ray and DeepSpeed are known here only by the names of their loggers and switches.
"""

import itertools
import json
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import rich.console

from openrlhf.config.base import Caution

_LOGGER = logging.getLogger("openrlhf")
_LOGGER.addHandler(logging.NullHandler())
_LOGGER.setLevel(logging.INFO)
_LOGGER.propagate = False

VLLM_LOGGING = "VLLM_LOGGING_CONFIG_PATH"  # which vLLM reads as it is imported
LOGS = "logs"  # folder of what processes and frameworks say
STDERR = "_stderr"  # behind a metric's name: the standard error of its mean
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

# What libraries warn of at each import: no GPU is here, a kernel nobody asked for is not installed.
FALSE_ALARMS = {
    "DeepSpeed": "Setting accelerator to CPU",
    "bitsandbytes.backends.cpu.ops": "gemm_4bit_forward",
}

Values = Mapping[str, float]


def make_console(*, is_error: bool = False) -> rich.console.Console:
    """Return a console on stdout (or stderr) that colours only what the caller marks."""
    return rich.console.Console(stderr=is_error, highlight=False, soft_wrap=True, markup=False)


def is_terminal() -> bool:
    """Return True if a person watches: progress bars are drawn only then."""
    return make_console().is_terminal


def notice(message: str) -> None:
    """Say one line on the console and in the role's log file."""
    make_console().print(message)
    log(message)


def log(message: str) -> None:
    """Write to the role's log file alone."""
    _LOGGER.info(message)


def warn(message: str) -> None:
    """Say one line that deserves attention on stderr and in the role's log file."""
    make_console(is_error=True).print(f"warning: {message}", style="yellow")
    _LOGGER.warning(message)


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect what is warned of in the block."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    _LOGGER.addHandler(handler)
    try:
        yield found
    finally:
        _LOGGER.removeHandler(handler)


@cache
def warn_once(message: str) -> None:
    """Warn, once in the life of the process for one text."""
    warn(message)


def say_notices(lines: Iterable[str], *, about: str = "") -> None:
    """Say notices on stderr and in the role's log file: cautions as warnings, others plainly.

    `about` says what all of them are about.
    """
    for line in lines:
        if isinstance(line, Caution):
            warn(about + line)
        else:
            make_console(is_error=True).print(f"note: {about}{line}")
            _LOGGER.info("%s%s", about, line)


def format_count(number: float) -> str:
    """Return the short form of a count: 950, 1.8k, 3.1M, 7.2B."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{suffix}"
    return f"{number:.0f}"


def format_seconds(seconds: float) -> str:
    """Return the short form of a duration: 45s, 3m20s, 2h05m, 1d04h."""
    whole = round(seconds)
    for size, unit, part_size, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part_size:02}{part}"
    return f"{whole // 60}m{whole % 60:02}s" if whole >= 60 else f"{whole}s"


def print_banner(sections: Mapping[str, Mapping[str, object]]) -> None:
    """Say what is about to run: a block a section (model, devices, batch, ...), a line an entry."""
    width = max((len(name) for entries in sections.values() for name in entries), default=0)
    lines = []
    for title, entries in sections.items():
        lines.append(title)
        lines.extend(f"  {name:<{width}}  {value}" for name, value in entries.items())
    notice("\n".join(lines))


LOSSES = ("policy_loss", "loss", "gpt_loss", "kto_loss", "prm_loss", "distil_loss")
# Label on the step line, metrics of which the first one that was logged is shown, form of a number.
STEP_FIELDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("reward",), "{:.3f}"),
    ("score", ("score",), "{:.3f}"),
    ("loss", LOSSES, "{:.4f}"),
    ("acc", ("acc",), "{:.3f}"),
    ("len", ("response_length",), "{:.1f}"),
    ("kl", ("kl",), "{:.2g}"),
    ("clip", ("ppo_clip_ratio",), "{:.1%}"),
    ("grad", ("actor_grad_norm", "grad_norm"), "{:.2g}"),
    ("lr", ("actor_lr", "lr"), "{:.2g}"),
    ("stale", ("staleness_mean",), "{:.2g}"),
    ("tok/s", ("tokens_per_s",), ""),
)
PHASES = (
    ("wait", "timing/wait"),
    ("gen", "timing/generation"),
    ("reward", "timing/reward"),
    ("logp", "timing/make_experience"),
    ("train", "timing/ppo_train"),
    ("sync", "timing/broadcast"),
)


@dataclass(frozen=True)
class RunClock:
    """When this start of a run began, and behind which step."""

    first_step: int
    start_s: float = field(default_factory=time.monotonic)

    def words(self, step: int, total: int) -> str:
        """Return the time since the start and, at the pace since then, until the end."""
        elapsed_s = time.monotonic() - self.start_s
        left_s = elapsed_s * (total - step) / max(step - self.first_step, 1)
        return f"elapsed {format_seconds(elapsed_s)} | eta {format_seconds(left_s)}"


def step_line(step: int, total: int, metrics: Values, clock: RunClock | None = None) -> str:
    """Return one line: the numbers of `STEP_FIELDS` that were logged, seconds, and their split.

    Example: `step 12/60 | reward 0.412 | len 5.3 | 2.1s: gen 0.9 train 1.2 | elapsed 26s | eta
    1m45s`.
    """
    parts = [f"step {step}/{total}"]
    for label, names, form in STEP_FIELDS:
        if value := [metrics[name] for name in names if name in metrics]:
            parts.append(f"{label} {form.format(*value) if form else format_count(value[0])}")
    split = " ".join(f"{label} {metrics[name]:.1f}" for label, name in PHASES if name in metrics)
    if (seconds := metrics.get("timing/step_total")) is not None:
        split = f"{seconds:.1f}s: {split}".removesuffix(": ")
    if split:
        parts.append(split)
    if clock is not None:
        parts.append(clock.words(step, total))
    return " | ".join(parts)


def eval_line(step: int, metrics: Values) -> str:
    """Return one line of an evaluation: `eval at step 20 | math_pass1 0.412 ±0.011 | ...`."""
    shown = []
    for name, value in metrics.items():
        if name.startswith("eval") and "timing" not in name and not name.endswith(STDERR):
            error = metrics.get(name + STDERR)
            spread = "" if error is None else f" ±{error:.2g}"
            shown.append(f"{short_name(name)} {value:.4g}{spread}")
    return " | ".join([f"eval at step {step}", *shown])


def short_name(name: str) -> str:
    """Return the name of an evaluation's metric as lines show it."""
    return name.removeprefix("eval/").removeprefix("eval_")


SAME_REWARD = 1e-6  # the spread of rewards within prompts, below which they are equal
MAX_TRUNCATED_RATIO = 0.3
MAX_MISMATCH_KL = 0.01
MIN_ENTROPY_RATIO = 0.1  # of the entropy at the start of the run
NUM_START_STEPS = 5
MAX_UPDATE_RATIO = 0.1  # norm of an update by that of the weights; good ones: 1e-6 to 1e-2
LARGE_UPDATE_RATIO = 1e-3
MIN_UPDATE_RATIO = 1e-7  # of a number, float32 does not hold less
MAX_KL_JUMP = 1.0  # nats per token in one step
LARGE_KL = 1.0
MAX_LOSS_RISE = 2.0  # by its start


def _red_flags(metrics: Values, history: Sequence[Values], *, example: str) -> dict[str, str]:
    """Return what is wrong at a step, by the metric that shows it."""
    found = _rate_flags(metrics, history)
    if metrics.get("group_reward_std", 1.0) < SAME_REWARD and "rate" not in found:
        found["group_reward_std"] = (
            "all samples of every prompt got the same reward, so this step teaches nothing. "
            "Look at what the reward function returns; if that is right, try other prompts, a "
            f"higher --temperature or more --n_samples_per_prompt.{example}"
        )
    if (cut := metrics.get("response_clip_ratio", 0.0)) > MAX_TRUNCATED_RATIO:
        found["response_clip_ratio"] = (
            f"{cut:.0%} of the responses were cut at the length limit. "
            "Raise --generate_max_len or check that the model emits its EOS token."
        )
    mismatch = metrics.get("vllm_kl", 0.0)
    is_expected = metrics.get("staleness_max", 0.0) > 0  # older weights sampled
    if abs(mismatch) > MAX_MISMATCH_KL and not is_expected:
        found["vllm_kl"] = (
            f"engine and trainer disagree about log-probs (mismatch KL {mismatch:.3g}). "
            "Check dtype and temperature on both sides."
        )
    start = [past["entropy"] for past in history[:NUM_START_STEPS] if "entropy" in past]
    entropy = metrics.get("entropy", math.inf)
    if start and entropy < MIN_ENTROPY_RATIO * statistics.median(start):
        found["entropy"] = (
            f"entropy fell to {entropy:.3g}, under a tenth of its start. "
            "Try a smaller learning rate, a larger --init_kl_coef or --entropy_loss_coef."
        )
    return found


def _rate_flags(metrics: Values, history: Sequence[Values]) -> dict[str, str]:
    """Return what size and effect of the updates say of the learning rate: far too high under
    "rate", too small to change anything under "no_rate".
    """
    model = "actor_" if "actor_lr" in metrics else ""
    rate, flag = metrics.get(f"{model}lr"), f"--{model}learning_rate"
    if rate is None:
        return {}
    ratio = metrics.get(f"{model}update_ratio", 0.0)
    if signs := _signs_of_high_rate(metrics, history, ratio):
        return {
            "rate": f"{signs}: the learning rate is probably far too high ({rate:.2g} now). Try a "
            f"tenth of {flag}."
        }
    is_warm = bool(history) and rate <= history[-1].get(f"{model}lr", 0.0)
    if is_warm and f"{model}update_ratio" in metrics and ratio < MIN_UPDATE_RATIO:
        return {
            "no_rate": f"an update changes the weights by {ratio:.1g} of their size, which is lost "
            f"in rounding: nothing is learnt. Try a larger {flag} ({rate:.2g} now)."
        }
    return {}


def _signs_of_high_rate(metrics: Values, history: Sequence[Values], ratio: float) -> str:
    """Return what shows that the learning rate is far too high; empty if nothing does."""
    if ratio > MAX_UPDATE_RATIO:
        return f"an update changes the weights by {ratio:.0%} of their size"
    start, last = history[:NUM_START_STEPS], history[-1] if history else {}
    is_rl, kl = "group_reward_std" in metrics, metrics.get("kl")
    if is_rl and kl is not None and kl - last.get("kl", math.inf) > MAX_KL_JUMP:
        return f"the KL to the reference rose from {last['kl']:.2g} to {kl:.2g} in one step"
    # Rewards are equal that were not, and smaller: the responses have become alike.
    rewards = [past["reward"] for past in start if past.get("group_reward_std", 0) >= SAME_REWARD]
    is_alike = is_rl and metrics["group_reward_std"] < SAME_REWARD and bool(rewards)
    has_moved = ratio > LARGE_UPDATE_RATIO if kl is None else kl > LARGE_KL
    if is_alike and has_moved and metrics["reward"] < statistics.median(rewards):
        how = (
            f"an update changes the weights by {ratio:.1%}" if kl is None else f"the KL is {kl:.2g}"
        )
        return (
            f"all samples of every prompt get the same reward, a smaller one than before, and {how}"
        )
    name = next((name for name in LOSSES if name in metrics), "")
    losses = [past[name] for past in start if name in past]
    if not is_rl and losses and metrics[name] > MAX_LOSS_RISE * statistics.median(losses) > 0:
        return f"the loss rose from {statistics.median(losses):.3g} to {metrics[name]:.3g}"
    return ""


def hints(metrics: Values, history: Sequence[Values], *, example: str = "") -> list[str]:
    """Return a line for each red flag new at this step; `history` holds earlier steps' metrics.

    `example`: a sentence about one sample, for a hint that is about rewards.
    """
    before = _red_flags(history[-1], history[:-1], example="") if history else {}
    found = _red_flags(metrics, history, example=example)
    return [f"hint: {text}" for name, text in found.items() if name not in before]


def needed_history(history: Sequence[Values]) -> list[Values]:
    """Return the metrics of earlier steps that `hints` looks at: the first ones and the last."""
    return [*history[:NUM_START_STEPS], *history[NUM_START_STEPS:][-1:]]


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
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(LINE_FORMAT))
    logging.captureWarnings(capture=True)
    for name in FRAMEWORK_LOGGERS:
        _keep_in_file(name, handler)
    _LOGGER.handlers = [handler]
    if capture_streams:
        _capture_streams(path)
    return path


def _keep_in_file(name: str, handler: logging.Handler) -> None:
    """Make `handler` the only one of this logger, for good."""
    logger = logging.getLogger(name)
    logger.handlers = [handler]
    logger.propagate = False
    if name != "vllm":  # vLLM configures itself from the file given in VLLM_LOGGING
        logger.__class__ = _FileOnlyLogger


def _write_vllm_config(path: Path) -> Path:
    """A logging configuration that vLLM's own processes read too; beside the log file."""
    handler = {"class": "logging.FileHandler", "filename": str(path.resolve()), "formatter": "line"}
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
