"""The recipes in examples/configs: as they are, and with the values for 7B."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from openrlhf.cli.main import command
from openrlhf.config.cli import parse_config
from openrlhf.utils.tracker import read_metrics
from tests.source import ROOT

CONFIGS = ROOT / "examples" / "configs"
RECIPES = {path.stem: path.read_text() for path in sorted(CONFIGS.glob("*.yaml"))}
COMMAND = re.compile(r"openrlhf ([\w-]+) --config examples/configs/(\w+)\.yaml(.*)")
# The others start from what these write.
FIRST = ("sft", "rm", "generate", "score")
IN_ORDER = (*FIRST, *sorted(RECIPES.keys() - set(FIRST)))
# A metric of each command, and whether it rises or falls when the model learns.
LEARNS = {"sft": ("gpt_loss", -1), "rm": ("loss", -1), "dpo": ("loss", -1), "kto": ("kto_loss", -1)}
LEARNS |= {"prm": ("acc", 1), "kd": ("distil_loss", -1), "ppo": ("reward", 1)}


def command_of(name: str) -> str:
    """The command whose recipe it is, as the recipe's own first lines say."""
    return next(found[1] for found in COMMAND.finditer(RECIPES[name]) if found[2] == name)


def for_7b(text: str) -> str:
    """The recipe with the values that its comments name for a model of 7B."""
    text = re.sub(r"^(\w+): .*# 7B: (.*)$", r"\1: \2", text, flags=re.MULTILINE)
    return re.sub(r"^# 7B: (\w+: .*)$", r"\1", text, flags=re.MULTILINE)


def config_class(name: str):
    return command(command_of(name)).config_class


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_and_its_values_for_7b_are_understood_without_a_notice(name, tmp_path):
    for text in (RECIPES[name], for_7b(RECIPES[name])):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        assert parse_config(config_class(name), ["--config", str(path)]).notices == []
    assert "runs/tiny" not in yaml.safe_dump(yaml.safe_load(for_7b(RECIPES[name])))
    for known, used, _ in COMMAND.findall(RECIPES[name]):
        assert command_of(used) == known


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A checkout in which the data were made."""
    folder = tmp_path_factory.mktemp("as_they_are")
    (folder / "examples").symlink_to(ROOT / "examples")
    run(folder, "examples/python/make_demo.py", "runs/tiny")
    run(folder, "examples/python/make_vision_demo.py", "runs/tiny/vision")
    return folder


def run(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, *words], cwd=folder, check=True, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ORDER)
def test_a_recipe_runs_as_it_is_and_learns(name, checkout):
    cli = (sys.executable, "-m", "openrlhf.cli.main")
    for line in re.sub(r"\\\n#", "", RECIPES[name]).splitlines():
        words = line.removeprefix("#").split()
        runs_all = name in ("score", "grpo_vlm")
        if words[:1] == ["openrlhf"] and (runs_all or words[3].endswith(f"/{name}.yaml")):
            run(checkout, *cli[1:], *words[1:])
    if command_of(name) == "infer":
        return
    records = read_metrics(checkout / "runs" / "tiny" / name / "metrics.jsonl")
    metric, gain = LEARNS[command_of(name)]
    values = [record[metric] for record in records if metric in record]
    assert (values[-1] - values[0]) * gain > 0
