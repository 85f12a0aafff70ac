"""Which rows a command reads and how: the columns that it recognises, splits, caps and templates,
and the config that it leaves behind reads the same data in the same way.
"""

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from openrlhf.cli import check, train_sft
from openrlhf.commands import rl_inputs, train_supervised
from openrlhf.config.cli import parse_config, save_resolved
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.trainer.base_trainer import Inputs
from openrlhf.trainer.sft_trainer import SFTTrainer
from tests.helpers.losses import COMMANDS, make_row
from tests.integration.commands import exit_code
from tests.tiny import read_jsonl, write_jsonl

QUESTION = [{"role": "user", "content": "q"}]
DIALOGUE = [*QUESTION, {"role": "assistant", "content": "a"}]
OTHER = [*QUESTION, {"role": "assistant", "content": "b"}]
SAID = "read as messages, with the chat template"
# Command, flags, a row, what is said of it.
CASES = {
    "dialogues": ("sft", "", {"messages": DIALOGUE}, f"'messages' {SAID}"),
    "text": ("sft", "", {"text": "all of it"}, "every token is learnt"),
    "answers": ("sft", "", {"prompt": "q", "completion": "a"}, "read as text"),
    "pairs": (
        "dpo",
        "",
        {"prompt": QUESTION, "chosen": DIALOGUE[1:], "rejected": OTHER[1:]},
        f"'prompt' and 'chosen' and 'rejected' {SAID}",
    ),
    "whole dialogues": ("rm", "", {"chosen": DIALOGUE, "rejected": OTHER}, SAID),
    "labels": ("kto", "", {"prompt": QUESTION, "completion": DIALOGUE[1:], "label": True}, SAID),
    "steps": (
        "prm",
        "--placeholder_token # --reward_tokens + -",
        {"prompt": "q", "completions": ["a"], "labels": [True]},
        "steps and their labels",
    ),
}
TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"


@pytest.mark.parametrize("case", CASES)
def test_a_saved_config_reads_the_data_as_it_was_recognised(
    case: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    command, flags, row, said = CASES[case]
    config_class, recipe, _ = COMMANDS[command]
    data = write_jsonl(tmp_path / "rows.jsonl", [row] * 4)
    words = f"--pretrain {tiny_model_dir} --dataset {data} --save_path {tmp_path} {flags}".split()
    config = parse_config(config_class, words).config
    samples = train_supervised.prepare_inputs(recipe, config).samples
    assert [line for line in samples.notices if said in line]
    save_resolved(config, tmp_path / "config.yaml")
    again = parse_config(config_class, ["--config", str(tmp_path / "config.yaml")]).config
    repeated = train_supervised.prepare_inputs(recipe, again).samples
    assert repeated.fingerprint == samples.fingerprint


def inputs_of(model: Path, data: Path, command: str, *flags: str) -> Inputs:
    """What a command reads of `data`, for training and for evaluation."""
    config_class, recipe, needed = COMMANDS[command]
    line = f"--pretrain {model} --dataset {data} --eval_dataset {data} {needed.format(other=model)}"
    return train_supervised.prepare_inputs(
        recipe, parse_config(config_class, [*line.split(), *flags]).config
    )


def splits_of(inputs: Inputs) -> tuple[str, str]:
    """The splits that training and evaluation read, as their first row tells."""
    assert inputs.eval_samples is not None
    found = []
    for samples in (inputs.samples, inputs.eval_samples):
        token_ids, *_ = vars(samples[0]).values()
        text = inputs.tokenizer.decode(token_ids)
        found += [name for name in ("train", "test", "dev") if name in text]
    train, held_out = found
    return train, held_out


@pytest.mark.parametrize("command", COMMANDS)
def test_rows_come_from_the_split_that_was_named(
    tiny_model_dir: Path, tmp_path: Path, command: str
) -> None:
    rows = {name: make_row(0) for name in ("train", "test", "dev")}
    for name, row in rows.items():
        row |= {"input": name, "steps": f"{name}#", "labels": ["+"]}
    splits = {name: Dataset.from_list([row]) for name, row in rows.items()}
    DatasetDict(splits).save_to_disk(tmp_path)
    held_out = "train" if command in ("sft", "rm") else "test"
    for flags, expected in (
        ((), ("train", held_out)),
        (("--dataset_split", "dev"), ("dev", held_out)),
        (("--eval_split", "dev"), ("train", "dev")),
    ):
        assert splits_of(inputs_of(tiny_model_dir, tmp_path, command, *flags)) == expected


def test_a_cap_on_rows_and_a_chat_template_are_of_training_and_of_evaluation(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [make_row(0), make_row(1)])
    flags = ("--max_samples", "1", "--tokenizer_chat_template", TEMPLATE)
    inputs = inputs_of(tiny_model_dir, data, "sft", "--eval_split", "train", *flags)
    assert inputs.eval_samples is not None
    assert (len(inputs.samples), len(inputs.eval_samples)) == (1, 1)
    assert inputs.tokenizer.chat_template == TEMPLATE


def test_a_saved_config_leaves_open_what_evaluation_reads_otherwise(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "q", "completion": "a"}] * 4)
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": DIALOGUE}] * 2)
    words = f"--pretrain {tiny_model_dir} --dataset {pairs} --eval_dataset {chats}"
    config = parse_config(SFTConfig, f"{words} --save_path {tmp_path}".split()).config
    inputs = train_supervised.prepare_inputs(SFTTrainer, config)
    save_resolved(config, tmp_path / "c.yaml")
    again = parse_config(SFTConfig, ["--config", str(tmp_path / "c.yaml")]).config
    repeated = train_supervised.prepare_inputs(SFTTrainer, again)
    assert repeated.eval_samples is not None and inputs.eval_samples is not None
    assert repeated.samples.fingerprint == inputs.samples.fingerprint
    assert repeated.eval_samples.fingerprint == inputs.eval_samples.fingerprint


def test_a_run_that_skips_bad_rows_writes_them_beside_its_model(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    data, torn = tmp_path / "rows.jsonl", '{"messages": [{"role": "us'
    odd = {"messages": [*QUESTION, *DIALOGUE]}
    good = json.dumps({"messages": DIALOGUE})
    data.write_text("\n".join([good, torn, json.dumps(odd), good]))
    run_dir = tmp_path / "run"
    words = f"--pretrain {tiny_model_dir} --dataset {data} --save_path {run_dir} --bad_rows skip "
    words += "--max_epochs 1 --train_batch_size 2 --micro_train_batch_size 2"
    assert exit_code(check.main, ["sft", *words.split()]) == 0
    assert not run_dir.exists()
    train_sft.main(words.split())
    assert (run_dir / "config.json").is_file()
    first, second = read_jsonl(run_dir / "bad_rows.jsonl")
    assert (first["place"], first["row"]) == (f"{data}:2", torn)
    assert (second["place"], second["row"]) == (f"{data}: row 3", odd)


def first_prompt(config: PPOConfig) -> str:
    inputs = rl_inputs.prepare_inputs(config, has_engines=False)
    assert inputs.reward_source is not None
    inputs.reward_source.close()
    return inputs.prompts[0].prompt_text


def test_prompts_of_a_saved_config_are_rendered_as_they_were(
    tiny_model_dir: Path, tmp_path: Path, capsys
) -> None:
    rows = [{"prompt": QUESTION}] * 4
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    long_row = {"prompt": [{"role": "user", "content": "q" * 99}]}
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [*rows[:3], long_row])
    words = f"--eval_dataset {held_out} --prompt_max_len 64 --generate_max_len 8 "
    words += f"--pretrain {tiny_model_dir} --prompt_data {data} --save_path {tmp_path / 'run'} "
    words += "--remote_rm_url http://localhost:1 --vllm_num_engines 0 --rollout_batch_size 4 "
    words += "--train_batch_size 4 --micro_train_batch_size 1 --advantage_estimator reinforce"
    config = parse_config(PPOConfig, words.split()).config
    assert first_prompt(config) == "<|user|>q<|end|><|assistant|>"
    assert [line for line in capsys.readouterr().err.splitlines() if line] == [
        f"note: 'prompt' {SAID}",
        "warning: evaluation: 1 of 4 rows were left out: over-long",
    ]
    save_resolved(config, tmp_path / "config.yaml")
    again = parse_config(PPOConfig, ["--config", str(tmp_path / "config.yaml")]).config
    assert first_prompt(again) == "<|user|>q<|end|><|assistant|>"
