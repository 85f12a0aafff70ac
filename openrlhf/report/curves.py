"""Which metrics are drawn together: panels of curves, and the seconds of each phase of a step."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from openrlhf.report.run_folder import Run
from openrlhf.utils.metrics import STDERR
from openrlhf.utils.step_line import PHASES

MAX_POINTS = 1000  # of a curve; more are drawn as means of neighbours
MAX_BARS = 200

# Title, what it shows, metrics. A metric is drawn in the first panel that has its name, with or
# without `eval/` before it.
PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "evaluation",
        "Pass rates on the evaluation prompts; a bar is one standard error.",
        ("eval_*_pass*",),
    ),
    (
        "reward",
        "Mean over the samples of a step, before penalties, and its parts by name.",
        ("reward", "score", "reward/*", "eval_*_reward"),
    ),
    (
        "spread of rewards",
        "Standard deviation within a prompt's samples. At 0 a step teaches nothing.",
        ("group_reward_std",),
    ),
    ("response length", "Mean number of tokens.", ("response_length",)),
    (
        "responses cut off",
        "Share of the responses that the length limit ended.",
        ("response_clip_ratio", "truncated_rate"),
    ),
    ("KL", "Distance from the reference model, per token.", ("kl",)),
    ("entropy", "Of the policy, per token. Near 0 it no longer explores.", ("entropy",)),
    (
        "clipped tokens",
        "Share of the tokens whose ratio to the old policy was clipped.",
        ("ppo_clip_ratio", "is_cut_ratio"),
    ),
    (
        "engine against trainer",
        "Mismatch KL between the log-probs of the engine and of the trainer.",
        ("vllm_kl*",),
    ),
    (
        "loss",
        "The loss that is trained on; points are evaluations.",
        ("policy_loss", "loss", "gpt_loss", "kto_loss", "prm_loss", "distil_loss", "nll_loss"),
    ),
    ("critic loss", "Of the value model.", ("critic_loss",)),
    ("accuracy", "Share that was right; points are evaluations.", ("acc", "*_acc")),
    (
        "rewards of pairs",
        "Implicit rewards of chosen and rejected responses.",
        ("chosen_reward", "reject_reward", "reward_margin"),
    ),
    (
        "gradient norm",
        "Before clipping.",
        ("actor_grad_norm", "critic_grad_norm", "grad_norm"),
    ),
    ("learning rate", "As the schedule had it.", ("actor_lr", "critic_lr", "lr")),
    ("tokens per second", "", ("tokens_per_s",)),
    ("memory", "Most memory of a process up to that step, in GiB.", ("memory/*",)),
)
OTHERS = "others"  # section of the panels of metrics that PANELS does not name
SECTIONS = {"tokens per second": "time", "memory": "time"}  # the others stand under "curves"


@dataclass(frozen=True)
class Curve:
    """One metric of one run.

    Example: `Curve("run a", "reward", False, [1, 2, 3], [0.1, None, 0.5])`
    """

    run: str
    metric: str
    is_evaluation: bool
    steps: list[int]
    values: list[float | None]  # None where it was not finite
    errors: list[float | None] | None = None  # standard errors, where some were logged


@dataclass(frozen=True)
class Panel:
    """Curves that share an axis.

    Example: `Panel("learning rate", "As the schedule had it.", "curves", [curve])`
    """

    title: str
    meaning: str
    section: str
    curves: list[Curve]


def make_panels(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels that the runs have numbers for; each metric is in one of them."""
    left = dict.fromkeys(name for run in runs for record in run.records for name in record)
    for name in [n for n in left if n in ("step", "time") or n.startswith("timing/")]:
        del left[name]
    panels = []
    for title, meaning, patterns in PANELS:
        found = [(places[0], name) for name in left if (places := _places(name, patterns))]
        metrics = [name for _, name in sorted(found)]
        for name in metrics:
            del left[name]
            left.pop(name + STDERR, None)
        if metrics:
            curves = list(_curves(runs, metrics))
            panels.append(Panel(title, meaning, SECTIONS.get(title, "curves"), curves))
    singles = (name for name in left if not (name.endswith(STDERR)))
    return panels + [Panel(n, "", OTHERS, list(_curves(runs, [n]))) for n in singles]


def main_panels(panels: Sequence[Panel]) -> list[str]:
    """Return the titles of the panels that show at a glance whether a run learned: evaluation and
    reward, where there are none loss and accuracy.
    """
    drawn = {p.title for p in panels if any(len(curve.steps) > 1 for curve in p.curves)}
    is_rewarded = bool(drawn & {"evaluation", "reward"})
    wanted = ("evaluation", "reward") if is_rewarded else ("loss", "accuracy")
    return [title for title in wanted if title in drawn]


def _places(name: str, patterns: Sequence[str]) -> list[tuple[int, bool]]:
    """Return the patterns that a metric fits, and True if it is of an evaluation: what is trained
    on is drawn first.
    """
    own = name.removeprefix("eval/")
    is_value = not name.endswith(STDERR)
    fitting = [i for i, pattern in enumerate(patterns) if is_value and fnmatchcase(own, pattern)]
    return [(i, own != name) for i in fitting]


def _curves(runs: Sequence[Run], metrics: Iterable[str]) -> Iterator[Curve]:
    for metric in metrics:
        for run in runs:
            steps, values = run.series(metric)
            if not any(value is not None for value in values):
                continue
            is_evaluation = metric.startswith("eval/")
            known = dict(zip(*run.series(metric + STDERR), strict=True))
            errors = [known.get(step) for step in steps] if known else None
            if errors is None:
                steps, (values,) = thinned(steps, [values], MAX_POINTS)
            yield Curve(run.name, metric, is_evaluation, steps, values, errors)


def step_times(run: Run) -> dict[str, object] | None:
    """Return the seconds of a run's steps, as the page reads them; None where none were logged.

    Example: `{"run": "a", "steps": [1, 2], "phases": {"gen": [2.0, 2.1]}, "total": [3.5, 3.6]}`
    """
    records = [record for record in run.records if "timing/step_total" in record]
    if not records:
        return None
    labels = {name: label for label, name in PHASES}
    names = dict.fromkeys(
        [name for _, name in PHASES]
        + [n for r in records for n in r if n.startswith("timing/") and n != "timing/step_total"]
    )
    columns = {
        labels.get(name, name.removeprefix("timing/")): [record.get(name) for record in records]
        for name in names
        if any(name in record for record in records)
    }
    steps = [int(record["step"] or 0) for record in records]
    totals = [record["timing/step_total"] for record in records]
    steps, (total, *phases) = thinned(steps, [totals, *columns.values()], MAX_BARS)
    by_name = dict(zip(columns, phases, strict=True))
    return {"run": run.name, "steps": steps, "phases": by_name, "total": total}


def thinned(
    steps: list[int], columns: Sequence[list[float | None]], max_points: int
) -> tuple[list[int], list[list[float | None]]]:
    """Return at most `max_points` of each column: means of as many neighbours, at their last
    step.
    """
    width = -(-len(steps) // max_points)
    if width <= 1:
        return steps, list(columns)
    starts = range(0, len(steps), width)
    means = [[_mean(column[start : start + width]) for start in starts] for column in columns]
    return [steps[min(start + width, len(steps)) - 1] for start in starts], means


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return statistics.fmean(finite) if finite else None
