"""Data with the columns that Hugging Face names needs no flags: a command says what it recognised,
and the config that it leaves behind reads the same data in the same way.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from openrlhf.cli import train_dpo, train_kto, train_rm, train_sft
from openrlhf.config.cli import parse_config, save_resolved
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import DPOConfig, KTOConfig, PRMConfig, RMConfig, SFTConfig
from openrlhf.datasets.tokenized import as_recognised, undecided
from openrlhf.trainer import ppo_setup, supervised_run
from openrlhf.trainer.dpo_trainer import DPOTrainer
from openrlhf.trainer.kto_trainer import KTOTrainer
from openrlhf.trainer.prm_trainer import PRMTrainer
from openrlhf.trainer.rm_trainer import RMTrainer
from openrlhf.trainer.sft_trainer import SFTTrainer
from tests.tiny import write_jsonl

QUESTION = [{"role": "user", "content": "q"}]
DIALOGUE = [*QUESTION, {"role": "assistant", "content": "a"}]
OTHER = [*QUESTION, {"role": "assistant", "content": "b"}]
STEPS = "--placeholder_token # --reward_tokens + -"
SAID = "read as messages, with the chat template"
CASES = {
    "dialogues": (SFTTrainer, SFTConfig, "", {"messages": DIALOGUE}, f"'messages' {SAID}"),
    "every turn": (SFTTrainer, SFTConfig, "--multiturn", {"conversations": DIALOGUE}, SAID),
    "text": (SFTTrainer, SFTConfig, "", {"text": "all of it"}, "every token is learnt"),
    "answers": (SFTTrainer, SFTConfig, "", {"prompt": "q", "completion": "a"}, "read as text"),
    "pairs": (
        DPOTrainer,
        DPOConfig,
        "",
        {"prompt": QUESTION, "chosen": DIALOGUE[1:], "rejected": OTHER[1:]},
        f"'prompt' and 'chosen' and 'rejected' {SAID}",
    ),
    "whole dialogues": (RMTrainer, RMConfig, "", {"chosen": DIALOGUE, "rejected": OTHER}, SAID),
    "labels": (
        KTOTrainer,
        KTOConfig,
        "",
        {"prompt": QUESTION, "completion": DIALOGUE[1:], "label": True},
        SAID,
    ),
    "steps": (
        PRMTrainer,
        PRMConfig,
        STEPS,
        {"prompt": "q", "completions": ["a"], "labels": [True]},
        "steps and their labels",
    ),
    "labelled text": (PRMTrainer, PRMConfig, STEPS, {"text": "a#", "labels": ["+"]}, "its labels"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_saved_config_reads_the_data_as_it_was_recognised(
    case: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    recipe, config_class, flags, row, said = CASES[case]
    data = write_jsonl(tmp_path / "rows.jsonl", [row] * 4)
    words = f"--pretrain {tiny_model_dir} --dataset {data} --save_path {tmp_path} {flags}".split()
    config = parse_config(config_class, words).config
    samples = supervised_run.prepare_inputs(recipe, config).samples
    assert [line for line in samples.notices if said in line]
    save_resolved(as_recognised(config, samples), tmp_path / "config.yaml")
    again = parse_config(config_class, ["--config", str(tmp_path / "config.yaml")]).config
    repeated = supervised_run.prepare_inputs(recipe, again).samples
    assert repeated.fingerprint == samples.fingerprint
    assert repeated.recognised == samples.recognised


def test_a_saved_config_leaves_open_what_evaluation_reads_otherwise(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "q", "completion": "a"}] * 4)
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": DIALOGUE}] * 2)
    words = f"--pretrain {tiny_model_dir} --dataset {pairs} --eval_dataset {chats}"
    config = parse_config(SFTConfig, f"{words} --save_path {tmp_path}".split()).config
    inputs = supervised_run.prepare_inputs(SFTTrainer, config)
    data = (inputs.samples, inputs.eval_samples)
    resolved = as_recognised(config, *data)
    save_resolved(resolved, tmp_path / "c.yaml", without=undecided(resolved, *data))
    again = parse_config(SFTConfig, ["--config", str(tmp_path / "c.yaml")]).config
    repeated = supervised_run.prepare_inputs(SFTTrainer, again)
    assert repeated.eval_samples is not None and inputs.eval_samples is not None
    assert repeated.samples.fingerprint == inputs.samples.fingerprint
    assert repeated.eval_samples.fingerprint == inputs.eval_samples.fingerprint


def test_prompts_of_a_saved_config_are_rendered_as_they_were(
    tiny_model_dir: Path, tmp_path: Path, capsys
) -> None:
    rows = [{"prompt": QUESTION}] * 4
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    long_row = {"prompt": [{"role": "user", "content": "q" * 99}]}
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [*rows, long_row])
    words = f"--eval_dataset {held_out} --prompt_max_len 64 --generate_max_len 8 "
    words += f"--pretrain {tiny_model_dir} --prompt_data {data} --save_path {tmp_path / 'run'} "
    words += "--remote_rm_url http://localhost:1 --vllm_num_engines 0 --rollout_batch_size 4 "
    words += "--train_batch_size 4 --micro_train_batch_size 1 --advantage_estimator reinforce"
    config = parse_config(PPOConfig, words.split()).config
    with ppo_setup.prepare_inputs(config, has_engines=False) as inputs:
        assert inputs.prompts[0].prompt_text == "<|user|>q<|end|><|assistant|>"
        resolved = as_recognised(config, inputs.prompts, inputs.eval_prompts)
    assert [line for line in capsys.readouterr().err.splitlines() if line] == [
        f"note: 'prompt' {SAID}",
        "warning: evaluation: 1 of 5 prompts are over 64 tokens and were left out",
    ]
    save_resolved(resolved, tmp_path / "config.yaml")
    again = parse_config(PPOConfig, ["--config", str(tmp_path / "config.yaml")]).config
    with ppo_setup.prepare_inputs(again, has_engines=False) as inputs:
        assert inputs.prompts[0].prompt_text == "<|user|>q<|end|><|assistant|>"
        assert inputs.prompts.notices == []


COMMANDS = {"sft": train_sft, "rm": train_rm, "dpo": train_dpo, "kto": train_kto}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "case"),
    [("sft", "dialogues"), ("sft", "text"), ("rm", "whole dialogues"), ("dpo", "pairs"),
     ("kto", "labels")],
)  # fmt: skip
def test_a_command_without_flags_trains_on_what_it_recognised(
    command: str, case: str, tiny_model_dir: Path, tmp_path: Path, capsys
) -> None:
    *_, row, said = CASES[case]
    others = [row | {"label": index % 2 == 0} if "label" in row else row for index in range(8)]
    data = write_jsonl(tmp_path / "rows.jsonl", others)
    words = f"--pretrain {tiny_model_dir} --dataset {data} --eval_dataset {data} "
    words += f"--save_path {tmp_path / 'run'} --train_batch_size 4 --micro_train_batch_size 2"
    COMMANDS[command].main(words.split())
    told = capsys.readouterr().err
    assert told.count(said) == 1  # of the evaluation's data it need not be said again
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert resolved["data"]["apply_chat_template"] is (case != "text")
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_run_goes_on_from_its_own_config_and_on_no_other_data(
    tiny_model_dir: Path, tmp_path: Path, capsys
) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [{"messages": DIALOGUE}] * 4)
    words = f"--pretrain {tiny_model_dir} --dataset {data} --save_path {tmp_path / 'run'} "
    words += f"--ckpt_path {tmp_path / 'ckpt'} --train_batch_size 2 --micro_train_batch_size 1 "
    words += "--save_steps 1 --max_epochs 1"
    train_sft.main(words.split())
    capsys.readouterr()
    again = ["--config", str(tmp_path / "run" / "config.yaml"), "--load_checkpoint"]
    train_sft.main([*again, "--max_epochs", "2"])
    assert "apply_chat_template" not in capsys.readouterr().err  # not a change
    write_jsonl(data, [{"messages": DIALOGUE}] * 3)  # cut at the end of a line
    with pytest.raises(SystemExit) as stop:
        train_sft.main([*again, "--max_epochs", "3"])
    assert stop.value.code == 2
    assert "4 samples then, 3 now" in capsys.readouterr().err
