"""The recipes in examples/configs: as they are, in small, and with the values for 7B."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
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
SUPERVISED = "--max_samples 16 --train_batch_size 8 --micro_train_batch_size 8 --logging_steps 1"
SMALL = dict.fromkeys(("sft", "rm", "dpo", "kto", "prm", "kd"), SUPERVISED) | {
    "infer": "--max_samples 8 --best_of_n 2 --eval_task generate",
    "ppo": "--max_samples 4 --rollout_batch_size 2 --n_samples_per_prompt 2 --train_batch_size 4 "
    "--eval_steps -1 --vllm_num_engines 0 --reward_num_workers 1",
}
# The others start from what these write; the last two are flags of score.yaml.
FIRST = ("sft", "rm", "generate", "score")
QUICK = ("dpo", "kto", "prm", "kd", "rejection_sampling", "iterative_dpo", "conditional_sft")
QUICK += ("ppo", "grpo")
IN_ORDER = (*FIRST, *sorted(RECIPES.keys() - set(FIRST)))
# A metric of each command, and whether it rises or falls when the model learns.
LEARNS = {"sft": ("gpt_loss", -1), "rm": ("loss", -1), "dpo": ("loss", -1), "kto": ("kto_loss", -1)}
LEARNS |= {"prm": ("acc", 1), "kd": ("distil_loss", -1), "ppo": ("reward", 1)}
CHOICES = ("iter_dpo", "answer_pairs"), ("csft", "answers_with_reward")


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


def run_small(name: str, *flags: str) -> None:
    """The command of a recipe in this process, without Ray and vLLM."""
    known = command_of(name)
    small = "" if name == "score" else SMALL[known]
    main = command("ppo-local" if known == "ppo" else known)
    main(["--config", f"examples/configs/{name}.yaml", *small.split(), *flags])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """A checkout in which data, an SFT and a reward model and scored answers were made."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(ROOT / "examples" / "python"))
        patch.setattr("make_demo.NUM_WARM_UP_ROWS", 64)
        patch.setattr("make_demo.NUM_RATED_ROWS", 64)
        patch.setattr(sys, "argv", ["make_demo.py", "runs/tiny"])
        importlib.import_module("make_demo").main()
        for name in FIRST:
            run_small(name)
        for post_processor, output in CHOICES:
            path = f"runs/tiny/{output}.jsonl"
            run_small("score", "--post_processor", post_processor, "--output_path", path)
        yield folder / "runs" / "tiny"


@pytest.mark.parametrize("name", QUICK)
def test_a_recipe_trains_in_small(name, folder):
    run_small(name)
    records = read_metrics(folder / name / "metrics.jsonl")
    assert {"loss", "gpt_loss", "reward"} & {key for record in records for key in record}
    assert (folder / name / "config.json").is_file()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A checkout in which the data were made."""
    folder = tmp_path_factory.mktemp("as_they_are")
    (folder / "examples").symlink_to(ROOT / "examples")
    run(folder, "examples/python/make_demo.py", "runs/tiny")
    return folder


def run(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, *words], cwd=folder, check=True, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ORDER)
def test_a_recipe_runs_as_it_is_and_learns(name, checkout):
    cli = (sys.executable, "-m", "openrlhf.cli.main")
    for line in re.sub(r"\\\n#", "", RECIPES[name]).splitlines():
        words = line.removeprefix("#").split()
        if words[:1] == ["openrlhf"] and (name == "score" or words[3].endswith(f"/{name}.yaml")):
            run(checkout, *cli[1:], *words[1:])
    if command_of(name) == "infer":
        return
    records = read_metrics(checkout / "runs" / "tiny" / name / "metrics.jsonl")
    metric, gain = LEARNS[command_of(name)]
    values = [record[metric] for record in records if metric in record]
    assert (values[-1] - values[0]) * gain > 0
