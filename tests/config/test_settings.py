"""Every setting of every command, as users know it: its names, type and default.

`python -m tests.config.test_settings` writes settings.txt anew: a changed line is a change that
users see.
"""

from __future__ import annotations

import ast
import math
import re
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from pydantic import BaseModel

from openrlhf.config.base import Option, value_at, walk
from openrlhf.config.cli import build, literal_choices, parse_config
from openrlhf.config.flags import flag_table, leaf_types, read_all
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.run import CommandConfig
from openrlhf.config.serving import (
    BatchInferenceConfig,
    ChatConfig,
    LoraCombinerConfig,
    ServeRewardConfig,
)
from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
)
from tests.source import modules

SETTINGS = Path(__file__).with_name("settings.txt")
COMMANDS: dict[str, type[CommandConfig]] = {
    "train_sft": SFTConfig,
    "train_rm": RMConfig,
    "train_dpo": DPOConfig,
    "train_kto": KTOConfig,
    "train_prm": PRMConfig,
    "train_kd": KDConfig,
    "train_ppo_ray": PPOConfig,
    "batch_inference": BatchInferenceConfig,
    "serve_rm": ServeRewardConfig,
    "lora_combiner": LoraCombinerConfig,
    "interactive_chat": ChatConfig,
}
CONFIGS = tuple(COMMANDS.values())
TIME = re.compile(r"\d{8}-\d{6}|\d{4}T\d\d:\d\d|\d{4}T\d{6}")


def defaults(config_class: type[CommandConfig]) -> CommandConfig:
    return build(config_class, {})[0]


def described(config_class: type[CommandConfig]) -> Iterator[str]:
    """One line a setting: path, type and default, other names."""
    config = defaults(config_class)
    others: dict[str, list[str]] = {}
    for name, targets in flag_table(config_class).items():
        for target in targets:
            if name != target.option.path:
                others.setdefault(target.option.path, []).append(f"--{name}")
    for option in walk(config_class):
        default = TIME.sub("TIME", repr(value_at(config, option.path)))
        kind = str(option.field.annotation).replace("typing.", "").removeprefix("<class '")
        names = " ".join(sorted(others.get(option.path, [])))
        yield f"--{option.path}: {kind.removesuffix(chr(39) + '>')} = {default} {names}".rstrip()
    yield from (f"--{name}: without effect" for name in config_class.dead_flags)


def settings() -> str:
    parts = [f"{name}\n" + "\n".join(described(c)) for name, c in COMMANDS.items()]
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_settings_have_the_names_and_defaults_that_users_know(command, monkeypatch):
    for name in ("OPENRLHF_ASYNC_QUEUE_SIZE", "OPENRLHF_ASYNC_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    known = dict(part.split("\n", 1) for part in SETTINGS.read_text().strip().split("\n\n"))
    assert list(described(COMMANDS[command])) == known[command].splitlines()


SAMPLES = ("7", "0.25", "3", "2", "true", "gspo", "0.5 0.75", "7 9", "a b")


def sample_of(config_class: type[CommandConfig], option: Option) -> list[str] | None:
    """Words that give the setting another value than its default."""
    kind = str(option.field.annotation)
    choices = re.findall(r"'([^']*)'", kind) if "Literal" in kind else []
    before = value_at(defaults(config_class), option.path)
    for words in ("false", *choices, *SAMPLES):
        reading = read_all(config_class, [f"--{option.path}", *words.split()])
        if reading.problems:
            continue
        config, wrong = build(config_class, reading.values)
        if not wrong and value_at(config, option.path) != before:
            return words.split()
    return None


@pytest.mark.parametrize("command", COMMANDS)
def test_every_name_of_a_setting_sets_it(command):
    config_class = COMMANDS[command]

    def value(name: str, words: list[str], path: str) -> object:
        reading = read_all(config_class, [f"--{name}", *words])
        assert not reading.problems, f"--{name} {words}: {reading.problems}"
        config, wrong = build(config_class, reading.values)
        assert not wrong, f"--{name} {words}: {wrong}"
        return value_at(config, path)

    samples = {option.path: sample_of(config_class, option) for option in walk(config_class)}
    assert [path for path, words in samples.items() if words is None] == []
    for name, targets in flag_table(config_class).items():
        for path in (target.option.path for target in targets):
            words = samples[path]
            if targets[0].meanings is None and words is not None:
                assert value(name, words, path) == value(path, words, path), name


def sections(config_class: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield config_class
    for field in config_class.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation)


def test_another_default_changes_nothing_about_resuming():
    for section in {part for config_class in CONFIGS for part in sections(config_class)}:
        for parent in section.__mro__[1:]:
            for name, field in getattr(parent, "model_fields", {}).items():
                extra, own = field.json_schema_extra, section.model_fields[name].json_schema_extra
                if isinstance(extra, dict) and (rule := extra["option"].at_resume):
                    assert own["option"].at_resume == rule, (section, name)


BOUNDS = {"gt": ("above", 0), "ge": ("at least", -1), "lt": ("below", 0), "le": ("at most", 1)}


def said_of(config_class: type[CommandConfig], option: Option, word: object) -> list[str]:
    reading = read_all(config_class, [f"--{option.path}", str(word)])
    return [*reading.problems, *build(config_class, reading.values)[1].values()]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_value_is_one_line_with_flag_value_and_remedy(command):
    for option in walk(COMMANDS[command]):
        if str in leaf_types(option) and not literal_choices(option.field.annotation):
            continue  # any text will do
        [line] = said_of(COMMANDS[command], option, "nonsense")
        assert re.fullmatch(rf"--{option.path} (must be|takes) .*: nonsense\. Type .*\.", line)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_value_out_of_range_is_one_line_that_names_the_bound(command):
    for option in walk(COMMANDS[command]):
        kind = float if float in leaf_types(option) else int
        for bound in option.field.metadata:
            for name, (words, step) in BOUNDS.items():
                if (limit := getattr(bound, name, None)) is not None:
                    limit, typed = kind(limit), math.ceil(limit) + step
                    assert said_of(COMMANDS[command], option, typed) == [
                        f"--{option.path} must be {words} {limit}: {typed}. Type a value {words} "
                        f"{limit}."
                    ]


def test_default_run_folders_differ_by_command_and_time(monkeypatch):
    assert re.fullmatch(r"./ckpt/sft-\d{8}-\d{6}", defaults(SFTConfig).ckpt.output_dir)
    assert defaults(PPOConfig).ckpt.output_dir.startswith("./ckpt/ppo-")
    given = parse_config(
        SFTConfig, ["--pretrain", "a/b", "--dataset", "a/b", "--save_path", "./ckpt"]
    )
    assert given.config.ckpt.output_dir == "./ckpt"
    monkeypatch.setenv("LOCAL_RANK", "1")  # ranks of one launcher, a moment apart
    first = defaults(SFTConfig).ckpt.output_dir
    time.sleep(1.1)
    assert defaults(SFTConfig).ckpt.output_dir == first


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_reads_its_own_config(name):
    module = import_module(f"openrlhf.cli.{name}")
    assert getattr(module, COMMANDS[name].__name__) is COMMANDS[name]


# Read inside the config alone: other leaves and properties follow from them.
READ_BY_CONFIG = {
    "model.ipo_enable",
    "rollout.greedy_sampling",
    "limits.max_body_mib",
    "algo.advantage.is_correction_enable",
    "algo.advantage.is_correction_type",
    "algo.advantage.is_correction_level",
    "algo.advantage.is_correction_mode",
    "algo.advantage.is_correction_clamp_survivors",
}
# Accepted for old commands.
WITHOUT_EFFECT = {
    "data.dataloader_num_workers",
    "data.disable_fast_tokenizer",
    "data.image_key",
    "ds.packing_samples",
    "model.compute_fp32_loss_enable",
    "muon.nesterov",
    "muon.ns_steps",
}


def names_read() -> set[str]:
    """Every attribute that code outside the config reads."""
    return {
        node.attr
        for module in modules()
        if not module.name.startswith("openrlhf.config.")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def without_role(path: str) -> str:
    """`muon.lr` of `actor.muon.lr`: the settings of an optimizer are those of every model."""
    return path.removeprefix("actor.").removeprefix("critic.") if ".muon." in path else path


def test_every_setting_is_read():
    read = names_read()
    unread = {
        without_role(option.path)
        for config_class in CONFIGS
        for option in walk(config_class)
        if option.path.rpartition(".")[2] not in read
    }
    refused = {"actor.freeze_visual_encoder", "data.max_images_per_prompt"}
    assert unread <= READ_BY_CONFIG | WITHOUT_EFFECT | refused


if __name__ == "__main__":
    SETTINGS.write_text(settings())
