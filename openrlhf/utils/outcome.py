"""What a run says at its end: where things are, what was best, and whether the model got worse."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from openrlhf.utils.console import notice, warn
from openrlhf.utils.metrics import STDERR, Values
from openrlhf.utils.run_folder import DUMPS, LOGS, METRICS_FILE, ROLLOUTS
from openrlhf.utils.step_line import LOSSES, SAME_REWARD, short_name

MAX_FALL = 2.0  # standard errors of a difference that may be chance
MIN_THIRD = 3  # steps in a third of a run, to compare thirds
MAX_SOLVED = 0.99  # a score above has no room to rise
PASS1 = "_pass1"  # ends the name of the pass rate of a data source
BESIDE = (METRICS_FILE, ROLLOUTS, DUMPS, LOGS)  # a model in a run folder


def say_saved(run_dir: Path) -> None:
    """Print where the model is, and what lies beside it."""
    beside = [name for name in BESIDE if (run_dir / name).exists()]
    notice(f"model saved to {run_dir}, beside {', '.join(beside)}")


def say_outcome(
    name: str | None,
    found: Sequence[Values],
    steps: Sequence[Values],
    *,
    where: Callable[[int], object],
) -> None:
    """Compare the first, the best and the last of several evaluations by a metric, or else of the
    steps of training; warn of a model that became worse than its best by it, or by pass@1 of
    another data source. Say how many steps taught nothing, and whether the reward rose alone.
    `steps` is all that was logged; `where` returns where the model of a step is.
    """
    for words in filter(None, (taught_nothing(steps), reward_alone(steps))):
        notice(f"hint: {words}")
    if name is None or len({values["step"] for values in known(found, name)}) < 2:
        say_best_step(steps)
        return
    first, best, last = noteworthy(found, name)
    step, label = int(best["step"]), short_name(name)
    notice(
        f"{label}: first {with_error(first, name)} (step {first['step']:.0f}), best "
        f"{with_error(best, name)} (step {step}, {where(step)}), last {with_error(last, name)} "
        f"(step {last['step']:.0f})"
    )
    for judged in (*other_pass_rates(steps, name), name):
        records = found if judged == name else steps
        if words := got_worse(records, judged):
            step = int(noteworthy(records, judged)[1]["step"])
            warn(f"{words}. The model of step {step}: {where(step)}.")


def stopped_early(evaluations: Sequence[Values], name: str) -> str:
    """Return the reason why a run ends before its last step."""
    num_worse = num_since_best(evaluations, name)
    if not known(evaluations, name):
        return f"early stop: {num_worse} evaluation(s) gave no finite {short_name(name)}"
    best = noteworthy(evaluations, name)[1]
    return (
        f"early stop: {num_worse} evaluation(s) in a row were not better "
        f"than {short_name(name)} {with_error(best, name)} of step {best['step']:.0f}"
    )


def got_worse(evaluations: Sequence[Values], name: str) -> str:
    """Return words for a last evaluation that is worse than the best by a metric; empty if it is
    not, or by no more than chance explains.
    """
    _, best, last = noteworthy(evaluations, name)
    if not has_fallen(best, last, name):
        return ""
    moved = "rose" if is_loss(name) else "fell"
    return (
        f"the model got worse: {short_name(name)} {moved} from {with_error(best, name)} at step "
        f"{best['step']:.0f} to {with_error(last, name)} at step {last['step']:.0f}, by more than "
        "two standard errors"
    )


def judged_metrics(records: Sequence[Values]) -> list[str]:
    """Return the metrics of evaluations by which a model may have become worse: pass@1 of each data
    source; without one, accuracy, or else the loss.
    """
    rates = sorted({name for values in records for name in values if name.endswith(PASS1)})
    others = ["eval/acc", *(f"eval/{loss}" for loss in LOSSES)]
    found = [name for name in rates or others if known(records, name)]
    return found if rates else found[:1]


def taught_nothing(records: Sequence[Values]) -> str:
    """Return words for the logged steps that had equal rewards within every prompt; empty if none
    had.
    """
    spreads = [values["group_reward_std"] for values in known(records, "group_reward_std")]
    count = sum(spread < SAME_REWARD for spread in spreads)
    if not count:
        return ""
    return (
        f"{count} of {len(spreads)} logged steps taught nothing: all samples of every prompt got "
        "the same reward"
    )


def reward_alone(records: Sequence[Values]) -> str:
    """Return words for a reward that rose over the logged steps while the score, which is not
    trained on, did not: the last third of them against the first, by more than chance. Empty if
    that is not so.
    """
    steps = known(known(records, "reward"), "score")
    size = len(steps) // 3
    if size < MIN_THIRD:
        return ""
    means, gains = {}, {}
    for name in ("reward", "score"):
        first, last = ([v[name] for v in part] for part in (steps[:size], steps[-size:]))
        error = math.hypot(*(statistics.stdev(part) / math.sqrt(size) for part in (first, last)))
        means[name] = statistics.fmean(first), statistics.fmean(last)
        gains[name] = means[name][1] - means[name][0] > MAX_FALL * error
    if gains["score"] or not gains["reward"] or means["score"][1] > MAX_SOLVED:
        return ""
    (reward, more), (score, same) = means["reward"], means["score"]
    return (
        f"the reward rose from {reward:.3g} to {more:.3g}, and the score, which is not trained "
        f"on, went from {score:.3g} to {same:.3g}: the policy may exploit the reward. Read samples"
    )


def other_pass_rates(records: Sequence[Values], name: str) -> list[str]:
    """Return the names of pass@1 of the data sources other than that of `name`."""
    rates = {each for values in records for each in values if each.endswith(PASS1)}
    return sorted(rates - {name}) if name.endswith(PASS1) else []


def say_best_step(records: Sequence[Values]) -> None:
    """Print the best step by its reward or loss."""
    names = [name for name in ("reward", *LOSSES) if known(records, name)]
    for name in names[:1]:
        _, best, last = noteworthy(records, name)
        notice(
            f"{name} of a step: best {best[name]:.4g} (step {best['step']:.0f}), last "
            f"{last[name]:.4g} (step {last['step']:.0f})"
        )


def known(records: Sequence[Values], name: str) -> list[Values]:
    """Return the records that have a number of this name."""
    return [values for values in records if values.get(name) is not None]


def is_loss(name: str) -> bool:
    """Return True if less of a metric is better."""
    return name.endswith("loss")


def noteworthy(evaluations: Sequence[Values], name: str) -> list[Values]:
    """Return the first, the best and the last of the evaluations by a metric, in that order."""
    found = known(evaluations, name)
    sign = -1 if is_loss(name) else 1
    # Of two that are equal the earlier one is the best: its model is the one that is kept.
    best = max(found, key=lambda values: (sign * values[name], -values["step"]))
    return [found[0], best, found[-1]]


def num_since_best(evaluations: Sequence[Values], name: str) -> int:
    """Return the number of evaluations by a metric after the best one, with those that gave no
    finite number; of all where none did.
    """
    found = [values for values in evaluations if name in values]
    if not known(found, name):
        return len(found)
    return len(found) - 1 - found.index(noteworthy(found, name)[1])


def has_fallen(best: Values, last: Values, name: str) -> bool:
    """Return True if the last value is worse than the best by more than chance explains."""
    found = [values.get(name + STDERR) for values in (best, last)]
    errors = [error for error in found if error is not None]
    fall = (best[name] - last[name]) * (-1 if is_loss(name) else 1)
    return len(errors) == 2 and fall > MAX_FALL * math.hypot(*errors)


def with_error(values: Values, name: str) -> str:
    """Return a metric and its standard error, which that of a single prompt lacks."""
    error = f" ±{values[name + STDERR]:.3f}" if name + STDERR in values else ""
    return f"{values[name]:.3f}{error}"
