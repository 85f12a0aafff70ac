"""What a run folder says of its run: metrics, settings, hints, and how far it came."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from openrlhf.config.base import CommandConfig, Option, walk
from openrlhf.config.cli import read_resolved
from openrlhf.config.evaluation import EvaluateConfig
from openrlhf.config.methods import METHODS
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.utils.console import format_seconds
from openrlhf.utils.outcome import got_worse, judged_metrics, reward_alone, taught_nothing
from openrlhf.utils.run_folder import CONFIG_FILE, METRICS_FILE, read_ending
from openrlhf.utils.step_line import hints, needed_history
from openrlhf.utils.tracker import read_metrics

Record = Mapping[str, float | None]  # a value that was not finite is None
UNSET = ("null", "false", "", "0", "-1")
NAMED_BY_TIME = "logger.wandb.run_name"


@dataclass(frozen=True)
class Run:
    """A run folder that was read.

    Example: `Run("sft", Path("out/sft"), [{"step": 1, "gpt_loss": 2.3}], {"train.seed": "42"})`
    """

    name: str
    path: Path
    records: Sequence[Record]
    settings: Mapping[str, str]  # by dotted name

    @property
    def last_step(self) -> int:
        """Return the last step that was logged; 0 before the first."""
        return max((int(record["step"] or 0) for record in self.records), default=0)

    @cached_property
    def hints(self) -> list[tuple[int, str]]:
        """Return the problems of the run and the step of each: the hints that the console showed,
        and the metrics that were not finite.
        """
        found, history = [], []
        for record in self.records:
            step = int(record["step"] or 0)
            lost = [name for name, value in record.items() if value is None]
            if lost:
                found.append((step, f"not finite: {', '.join(lost)}"))
            if _is_evaluation(record):
                continue
            values = {name: value for name, value in record.items() if value is not None}
            found += [(step, line.removeprefix("hint: ")) for line in hints(values, history)]
            history = needed_history([*history, values])
        return found

    def outcome(self) -> list[str]:
        """Return the problems that the console reports at the end of a run, as far as it went: how
        many steps taught nothing, and that the model got worse.
        """
        worse = (got_worse(self.records, name) for name in judged_metrics(self.records))
        told = (taught_nothing(self.records), reward_alone(self.records), *worse)
        return [words for words in told if words]

    def series(self, name: str) -> tuple[list[int], list[float | None]]:
        """Return steps and values of a metric; of several values of a step the last."""
        found = {int(r["step"] or 0): r[name] for r in self.records if name in r}
        return list(found), list(found.values())

    def facts(self) -> dict[str, str]:
        """Return the facts of the run as a whole, by title."""
        facts = {"folder": str(self.path), "state": self._state()}
        if seconds := self.seconds():
            facts["time"] = format_seconds(max(seconds.values()))
        for path in self.command.essentials:
            if self.settings.get(path, "null") not in UNSET:
                facts[self.options[path].flag.removeprefix("--")] = self.settings[path]
        facts.pop("save_path", None)  # is the folder
        return facts

    def seconds(self) -> dict[int, float]:
        """Return when each step was logged, in seconds since the first of them began."""
        times: dict[int, float] = {}
        for record in self.records:
            if (time := record.get("time")) is not None:
                times.setdefault(int(record["step"] or 0), time)
        if not times:
            return {}
        # A line of the log is of several steps, with the mean of their times.
        num_steps = min(int(self.settings.get("logger.logging_steps", 1)), *times)
        first_s = self.records[0].get("timing/step_total") or 0.0
        start = min(times.values()) - num_steps * first_s
        return {step: round(time - start, 2) for step, time in times.items()}

    @cached_property
    def command(self) -> type[CommandConfig]:
        """Return the settings of the command that wrote this run: those it has most names of."""
        supervised = (method.config_class for method in METHODS.values())
        commands: Iterator[type[CommandConfig]] = chain(supervised, (PPOConfig, EvaluateConfig))
        return max(commands, key=lambda c: len({o.path for o in walk(c)} & self.settings.keys()))

    @cached_property
    def options(self) -> dict[str, Option]:
        """Return the declarations of the settings of that command, by dotted name."""
        return {option.path: option for option in walk(self.command)}

    def default(self, name: str) -> str | None:
        """Return the default of a setting; None for one that has none."""
        has_default = name in self.options and name != NAMED_BY_TIME
        return _as_text(self.options[name].default) if has_default else None

    def _state(self) -> str:
        if (ended := read_ending(self.path)) is not None:
            if "error" in ended:
                return f"ended after step {self.last_step}: {ended['error']}"
            return f"finished, step {self.last_step}"
        if self.records and all(map(_is_evaluation, self.records)):
            return f"evaluation, step {self.last_step}"
        return f"at step {self.last_step}, not finished"


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read run folders, or folders of them, as an evaluation of several models writes; raise
    ConfigError with a line for each that is none.
    """
    paths = [run for path in paths for run in _runs_in(path)]
    wrong = [
        f"{path} is no run folder: it has no {METRICS_FILE}. Type a folder that a run wrote, the "
        "one named by --save_path."
        for path in paths
        if not _is_run(path)
    ]
    if wrong:
        raise ConfigError(wrong)
    paths = list({path.resolve(): path for path in paths}.values())
    return [
        Run(name, path, _records(path), _settings(path))
        for name, path in zip(short_names(paths), paths, strict=True)
    ]


def _is_run(path: Path) -> bool:
    return (path / METRICS_FILE).exists() or (path / CONFIG_FILE).exists()


def _runs_in(path: Path) -> list[Path]:
    """Return the runs in a folder that is none itself; else the folder."""
    inside = [] if _is_run(path) else sorted(path.glob(f"*/{METRICS_FILE}"))
    return [file.parent for file in inside] or [path]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return paths as they are seen from the last folder that holds all of them."""
    resolved = [path.resolve() for path in paths]
    base = os.path.commonpath([path.parent for path in resolved])
    return [os.path.relpath(path, base) for path in resolved]


def _is_evaluation(record: Record) -> bool:
    return any(name.startswith("eval") for name in record)


def _records(path: Path) -> list[Record]:
    file = path / METRICS_FILE
    return [record for record in read_metrics(file) if "step" in record] if file.exists() else []


def _settings(path: Path) -> dict[str, str]:
    file = path / CONFIG_FILE
    settings = read_resolved(file) if file.exists() else {}
    return {name: _as_text(value) for name, value in settings.items()}


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
