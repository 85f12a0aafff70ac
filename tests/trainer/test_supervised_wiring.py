"""From a command line to what is built of it: each flag reaches the loss, the trainer, the model,
the tokenizer or the rows that it is about. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor, nn

from openrlhf.algorithms.preference_loss import KTOOptions, PreferenceOptions, preference_loss
from openrlhf.config.cli import parse_config
from openrlhf.config.serving import BatchInferenceConfig, ChatConfig
from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
)
from openrlhf.models.loading import load_causal_lm
from openrlhf.serving import interactive_chat
from openrlhf.serving.batch_tasks import PromptTask
from openrlhf.trainer.base_trainer import BaseTrainer, LoopSettings
from openrlhf.trainer.dpo_trainer import DPOTrainer, loss_of
from openrlhf.trainer.kd_trainer import KDTrainer
from openrlhf.trainer.kto_trainer import KTOTrainer
from openrlhf.trainer.prm_trainer import PRMTrainer
from openrlhf.trainer.rm_trainer import RMTrainer
from openrlhf.trainer.sft_trainer import SFTTrainer
from openrlhf.trainer.supervised_run import Inputs, Recipe, SupervisedRun, prepare_inputs
from openrlhf.utils.tracking import NullTracker
from tests.tiny import make_model, write_jsonl

ANSWERED = "--input_key input --output_key output"
PAIRS = "--prompt_key input"
LORA = "--lora_rank 2 --target_modules q_proj"
COMMANDS: dict[str, tuple[type[SupervisedConfig], Recipe, str]] = {
    "sft": (SFTConfig, SFTTrainer, ANSWERED),
    "rm": (RMConfig, RMTrainer, PAIRS),
    "dpo": (DPOConfig, DPOTrainer, PAIRS),
    "kto": (KTOConfig, KTOTrainer, ANSWERED),
    "prm": (PRMConfig, PRMTrainer, "--input_key steps --label_key labels --placeholder_token #"),
    "kd": (KDConfig, KDTrainer, f"{ANSWERED} --teacher_model {{root}}/other"),
}


def make_row(text: str) -> dict:
    """A row that every command can read, with its text at the beginning of each sequence."""
    return {
        "input": text,
        "output": "a",
        "chosen": "a",
        "rejected": "b",
        "label": 1,
        "steps": f"{text}#",
        "labels": ["+"],
        "margin": 0.75,
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two mixtures of experts of the same shape, rows in a file, and rows in three splits."""
    root = tmp_path_factory.mktemp("wiring")
    for seed, name in enumerate(("model", "other")):
        make_model(root / name, "mixtral", hidden_size=32, seed=seed)
    write_jsonl(root / "rows.jsonl", [make_row("q"), make_row("r")])
    splits = {name: Dataset.from_list([make_row(name)]) for name in ("train", "test", "dev")}
    DatasetDict(splits).save_to_disk(root / "splits")
    return root


class Engine:
    """A model that was wrapped, and whether its weights are kept in CPU memory."""

    def __init__(self, module: nn.Module, *, offload: bool = False) -> None:
        self.module = module
        self.offload = offload


class Strategy:
    """Wraps models, and does nothing with them."""

    prepare_eval = staticmethod(Engine)


def parsed(root: Path, command: str, *flags: str) -> tuple[Recipe, SupervisedConfig]:
    config_class, recipe_class, needed = COMMANDS[command]
    line = f"--pretrain {root}/model --dataset {root}/rows.jsonl {needed.format(root=root)}"
    return recipe_class, parse_config(config_class, [*line.split(), *flags]).config


def inputs_of(root: Path, command: str, *flags: str) -> Inputs:
    return prepare_inputs(*parsed(root, command, *flags))


def make_trainer(root: Path, command: str, flags: str) -> tuple[Any, Any]:
    """The trainer of a command line, and the model it would train."""
    recipe, config = parsed(root, command, *flags.format(root=root).split())
    inputs = prepare_inputs(recipe, config)
    model = recipe.load_model(config, inputs.model_path)
    settings = LoopSettings.of(config)
    run = SupervisedRun(
        config,
        inputs,
        Strategy(),  # type: ignore[arg-type]
        model,
        Engine(model),  # type: ignore[arg-type]
        settings,
        NullTracker(),
    )
    trainer = recipe.of(run)
    assert isinstance(trainer, BaseTrainer)
    return trainer, model


LOSSES = {
    "--beta 0.3": ("sigmoid", PreferenceOptions(beta=0.3)),
    "--label_smoothing 0.2": ("sigmoid", PreferenceOptions(label_smoothing=0.2)),
    "--ipo": ("ipo", PreferenceOptions()),
    "--loss_type ipo --ipo_length_average": ("ipo", PreferenceOptions(ipo_length_average=True)),
    "--loss_type simpo --simpo_gamma 1.5": ("simpo", PreferenceOptions(simpo_gamma=1.5)),
    "--loss_type exo_pair": ("exo_pair", PreferenceOptions(label_smoothing=1e-3)),
}


@pytest.mark.parametrize("flags", LOSSES)
def test_the_loss_of_dpo_has_the_numbers_of_its_flags(flags: str) -> None:
    line = f"--pretrain m --dataset d {flags}"
    assert loss_of(parse_config(DPOConfig, line.split()).config) == preference_loss(*LOSSES[flags])


# Command and flags; what is looked at in trainer and model; what it is with the flags, and without.
WIRES: dict[str, tuple[Callable[[Any, Any], object], object, object]] = {
    "dpo --nll_loss_coef 0.3 --aux_loss_coef 0.2": (
        lambda trainer, model: (trainer.nll_coef, trainer.aux_loss_coef),
        (0.3, 0.2),
        (0.0, 0.0),
    ),
    "dpo --beta 0.3": (lambda trainer, model: trainer.loss.options.beta, 0.3, 0.1),
    "dpo --precompute_ref_log_probs": (lambda trainer, model: trainer.precompute, True, False),
    "kto --precompute_ref_log_probs": (lambda trainer, model: trainer.precompute, True, False),
    "kto --beta 0.2 --desirable_loss_weight 3 --undesirable_loss_weight 0.5": (
        lambda trainer, model: trainer.options,
        KTOOptions(beta=0.2, desirable_weight=3.0, undesirable_weight=0.5),
        KTOOptions(beta=0.01, desirable_weight=1.0, undesirable_weight=1.0),
    ),
    "rm --loss logexp": (lambda trainer, model: trainer.loss_kind, "logexp", "sigmoid"),
    "rm --margin_loss": (
        lambda trainer, model: (trainer.with_margin, trainer.samples[0].margin),
        (True, 0.75),
        (False, 0.0),
    ),
    "prm --reward_tokens + -": (lambda trainer, model: trainer.places, {16: 0, 18: 1}, {}),
    "kd --kd_coef 0.25": (lambda trainer, model: model.coef, 0.25, 0.4),
    "kd --kd_divergence jsd": (lambda trainer, model: model.method.kind, "jsd", "forward"),
    "kd --teacher_offload": (lambda trainer, model: trainer.teacher.offload, True, False),
    "dpo --ref_offload": (lambda trainer, model: trainer.reference.engine.offload, True, False),
    "kto --ref_offload": (lambda trainer, model: trainer.reference.engine.offload, True, False),
    **{
        f"{command} --aux_loss_coef 0.5": (
            lambda trainer, model: (trainer.aux_loss_coef, model.top_k),
            (0.5, 2),
            (0.0, None),
        )
        for command in COMMANDS
    },
}


@pytest.mark.parametrize("line", WIRES)
def test_a_flag_reaches_trainer_and_model(root: Path, line: str) -> None:
    look, expected, default = WIRES[line]
    command, _, flags = line.partition(" ")
    assert look(*make_trainer(root, command, flags)) == expected
    assert look(*make_trainer(root, command, "")) == default


def head_of(module: nn.Module) -> Tensor:
    """The weights of an actor's head."""
    return module.head.weight


@pytest.mark.parametrize("flags", ["", LORA])
def test_another_reference_is_the_model_that_was_named(root: Path, flags: str) -> None:
    trainer, model = make_trainer(root, "dpo", f"--ref_pretrain {root}/other {flags}")
    own, other = (load_causal_lm(root / name).lm_head.weight for name in ("model", "other"))
    assert not torch.equal(own, other)
    assert trainer.reference.actor is None
    assert torch.equal(head_of(trainer.reference.engine.module), other)
    assert torch.equal(head_of(model), own)


@pytest.mark.parametrize("command", ["dpo", "kto"])
def test_without_another_reference_it_is_the_model_that_training_starts_from(
    root: Path, command: str
) -> None:
    trainer, model = make_trainer(root, command, "")
    reference = trainer.reference.engine.module
    assert reference is not model and torch.equal(head_of(reference), head_of(model))
    adapted, model = make_trainer(root, command, LORA)
    assert adapted.reference.actor is model


def test_the_base_under_an_adapter_is_its_reference_also_where_it_is_named(root: Path) -> None:
    trainer, _ = make_trainer(root, "dpo", f"--ref_pretrain {root}/model {LORA}")
    assert trainer.reference.actor is trainer.engine.module


def test_a_loss_without_reference_loads_none(root: Path) -> None:
    line = f"--loss_type simpo --ref_pretrain {root}/other"
    assert make_trainer(root, "dpo", line)[0].reference is None


def test_the_teacher_is_the_model_that_was_named(root: Path) -> None:
    trainer, _ = make_trainer(root, "kd", "")
    teacher = load_causal_lm(root / "other").lm_head.weight
    assert torch.equal(head_of(trainer.teacher.module), teacher)


TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_chat_template_reaches_the_tokenizer_of_training(root: Path, command: str) -> None:
    given = inputs_of(root, command, "--tokenizer_chat_template", TEMPLATE)
    assert given.tokenizer.chat_template == TEMPLATE
    assert inputs_of(root, command).tokenizer.chat_template != TEMPLATE


def test_a_chat_template_renders_the_prompts_of_batch_inference(root: Path, tmp_path: Path) -> None:
    line = f"--eval_task generate --pretrain {root}/model --dataset {root}/rows.jsonl --input_key "
    line += f"input --output_path {tmp_path}/out.jsonl --apply_chat_template"
    words = [*line.split(), "--tokenizer_chat_template", TEMPLATE]
    task = PromptTask(parse_config(BatchInferenceConfig, words).config)
    assert [task.samples[index].prompt_text for index in range(2)] == ["[q]", "[r]"]


def test_a_chat_template_reaches_the_tokenizer_of_a_chat(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interactive_chat, "load_model", lambda *_: None)
    words = ["--pretrain", f"{root}/model", "--tokenizer_chat_template", TEMPLATE]
    chat = interactive_chat.Chat(parse_config(ChatConfig, words).config, StringIO())
    assert chat.tokenizer.chat_template == TEMPLATE


def splits_of(root: Path, command: str, *flags: str) -> tuple[str, str]:
    """The splits that training and evaluation read, as their first row tells."""
    both = ("--dataset", f"{root}/splits", "--eval_dataset", f"{root}/splits")
    inputs = inputs_of(root, command, *both, *flags)
    assert inputs.eval_samples is not None
    found = []
    for samples in (inputs.samples, inputs.eval_samples):
        token_ids, *_ = vars(samples[0]).values()
        text = inputs.tokenizer.decode(token_ids)
        found += [name for name in ("train", "test", "dev") if name in text]
    train, held_out = found
    return train, held_out


HELD_OUT = {
    "sft": "train",
    "rm": "train",
    "dpo": "test",
    "kto": "test",
    "prm": "test",
    "kd": "test",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_rows_come_from_the_split_that_was_named(root: Path, command: str) -> None:
    assert splits_of(root, command) == ("train", HELD_OUT[command])
    assert splits_of(root, command, "--dataset_split", "dev") == ("dev", HELD_OUT[command])
    assert splits_of(root, command, "--eval_split", "dev") == ("train", "dev")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--micro_train_batch_size 3", "3 rows"),
        ("--use_dynamic_batch --train_max_tokens_per_gpu 99", "at most 99 tokens"),
    ],
)
def test_the_banner_says_what_a_micro_batch_holds(flags: str, said: str) -> None:
    words = f"--pretrain m --dataset d {flags}".split()
    assert parse_config(SFTConfig, words).config.train.micro_batch_text == said
