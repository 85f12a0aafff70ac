"""The lines of a step, of an evaluation and of hints, as pure functions of metrics by their logged
names.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from openrlhf.utils.console import format_count, format_seconds
from openrlhf.utils.metrics import STDERR, Values

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
    ("skipped", ("num_skipped_updates",), "{:.0f}"),
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
    """When this start of a run began, and behind which step.

    Example: `RunClock(first_step=20, start_s=1000.0)`: at 1030.0, after step 23, a step takes 10 s.
    """

    first_step: int
    start_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.start_s

    def words(self, step: int, total: int) -> str:
        """Return the time since the start and, at the pace since then, until the end."""
        elapsed_s = self.elapsed_s
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

MAX_LOAD = 1.2  # threads that want a core, of which a run alone has one

MAX_SLOWDOWN = 5.0  # by the start of the run, in tokens per second

MIN_SLOW_STEP_S = 1.0


def _red_flags(metrics: Values, history: Sequence[Values], *, example: str) -> dict[str, str]:
    """Return the problems of a step, by the metric that shows each."""
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
    speeds = [past["tokens_per_s"] for past in history[:NUM_START_STEPS] if "tokens_per_s" in past]
    load, speed = metrics.get("load_per_core", 0.0), metrics.get("tokens_per_s", math.inf)
    is_slow = bool(speeds) and 0 < speed * MAX_SLOWDOWN < statistics.median(speeds)
    if is_slow and load > MAX_LOAD and metrics.get("timing/step_total", 0.0) > MIN_SLOW_STEP_S:
        found["load_per_core"] = (
            f"this step took {statistics.median(speeds) / speed:.0f} times as long for a token as "
            f"the first ones, and {load:.1f} threads wanted each core in the last minute. End "
            "other programs. A run of one thread (OMP_NUM_THREADS=1) waits least for them."
        )
    return found


def _rate_flags(metrics: Values, history: Sequence[Values]) -> dict[str, str]:
    """Return the problems of the learning rate, by size and effect of the updates: far too high
    under "rate", too small to change anything under "no_rate".
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
    has_gradient = metrics.get(f"{model}grad_norm", 1.0) > 0  # without one no rate changes anything
    has_ratio = f"{model}update_ratio" in metrics
    if is_warm and has_gradient and has_ratio and ratio < MIN_UPDATE_RATIO:
        return {
            "no_rate": f"an update changes the weights by {ratio:.1g} of their size, which is lost "
            f"in rounding: nothing is learnt. Try a larger {flag} ({rate:.2g} now)."
        }
    return {}


def _signs_of_high_rate(metrics: Values, history: Sequence[Values], ratio: float) -> str:
    """Return the sign that the learning rate is far too high; empty if there is none."""
    if ratio > MAX_UPDATE_RATIO:
        return f"an update changes the weights by {ratio:.0%} of their size"
    start, last = history[:NUM_START_STEPS], history[-1] if history else {}
    is_rl, kl = "actor_lr" in metrics, metrics.get("kl")
    if is_rl and kl is not None and kl - last.get("kl", math.inf) > MAX_KL_JUMP:
        return f"the KL to the reference rose from {last['kl']:.2g} to {kl:.2g} in one step"
    # Rewards are equal that were not, and smaller: the responses have become alike.
    rewards = [past["reward"] for past in start if past.get("group_reward_std", 0) >= SAME_REWARD]
    is_alike = metrics.get("group_reward_std", 1.0) < SAME_REWARD and bool(rewards)
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
