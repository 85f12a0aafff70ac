"""One HTML page about runs, with everything it needs in it; it asks the network for nothing."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from openrlhf.report.curves import Panel, main_panels, step_times
from openrlhf.report.run_folder import Run
from openrlhf.report.samples import excerpt, step_files
from openrlhf.utils.metrics import STDERR
from openrlhf.utils.step_line import short_name

FOLDER = Path(__file__).parent
SCRIPTS = ("vendor/plotly-basic.min.js", "vendor/tabulator.min.js", "templates/report.js")
STYLES = ("vendor/tabulator_simple.min.css", "templates/report.css")


def make_page(runs: Sequence[Run], panels: Sequence[Panel], *, is_served: bool) -> str:
    """Return the HTML of a report; one that is served asks its server for samples."""
    scripts = [_text(name) for name in SCRIPTS]
    data = {
        "is_served": is_served,
        "runs": [_run_data(run, panels, is_served=is_served) for run in runs],
        "panels": [asdict(panel) for panel in panels],
        "main": main_panels(panels),
        "times": list(filter(None, map(step_times, runs))),
    }
    return (
        _environment()
        .get_template("report.html")
        .render(
            names=[run.name for run in runs],
            facts=table([run.facts() for run in runs]),
            results=table([results(run) for run in runs]),
            hints=[
                (run.name, *hint)
                for run in runs
                for hint in (*(("", words) for words in run.outcome()), *run.hints)
            ],
            has_steps=any(run.records for run in runs),
            settings=settings(runs),
            data=data,
            scripts=scripts,
            styles=[_text(name) for name in STYLES],
            script_hashes=[_hash(script) for script in scripts],
        )
    )


def table(columns: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Return rows of a title and a value for each column, in the order of first appearance."""
    titles = dict.fromkeys(title for column in columns for title in column)
    return [(title, [column.get(title, "") for column in columns]) for title in titles]


def settings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return all settings of the runs: name and flags, the value in each run and the default, and
    whether a run has another value than that, and all have the same.
    """
    rows = []
    for name, values in table([run.settings for run in runs]):
        owner = next(run for run in runs if name in run.settings)
        flags = [flag for flag, _ in owner.options[name].names] if name in owner.options else []
        default = owner.default(name)
        rows.append(
            {
                "name": name,
                "other_names": " ".join(flags),
                "values": values,
                "default": default or "",
                "is_changed": default is not None and not {*values} <= {"", default},
                "is_same": len(set(values)) == 1,
            }
        )
    return rows


def results(run: Run) -> dict[str, str]:
    """Return first and last value of what a run is judged by: its evaluations, else its reward,
    loss and accuracy.
    """
    names = dict.fromkeys(name for record in run.records for name in record)
    judged = [name for name in names if name.startswith("eval/") and not name.endswith(STDERR)]
    judged = judged or [name for name in names if name in ("reward", "acc") or "loss" in name]
    return {short_name(name): text for name in judged if (text := _first_and_last(run, name))}


def _first_and_last(run: Run, name: str) -> str:
    steps, values = run.series(name)
    known = dict(zip(*run.series(name + STDERR), strict=True))
    found = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]

    def text(step: int, value: float) -> str:
        error = known.get(step)
        return f"{value:.4g}" + ("" if error is None else f" ±{error:.2g}") + f" (step {step})"

    return " → ".join(text(*point) for point in dict.fromkeys(found[:1] + found[-1:]))


def _run_data(run: Run, panels: Sequence[Panel], *, is_served: bool) -> dict[str, object]:
    files = step_files(run.path)
    samples = [] if is_served else excerpt(run.path, files)
    drawn = {s for panel in panels for c in panel.curves if c.run == run.name for s in c.steps}
    return {
        "name": run.name,
        "path": str(run.path),
        "last_step": run.last_step,
        "seconds": {step: time for step, time in run.seconds().items() if step in drawn},
        "files": [{"name": file.name, "label": file.label} for file in files],
        "num_samples": sum(file.num_samples for file in files),
        "samples": samples,
    }


@cache
def _environment() -> Environment:
    environment = Environment(loader=PackageLoader("openrlhf.report"), autoescape=True)
    # The order of names is the order on the page.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment


@cache
def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


@cache
def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
