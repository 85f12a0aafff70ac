"""Rows that cannot be learned from, and other wrong input of train_sft, end a command with
their line and exit code 2, before a model is loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import write_jsonl

PAIR = {"prompt": "p", "chosen": "good", "rejected": "bad"}
QUESTION = {"role": "user", "content": "q"}
REPLY = {"role": "assistant", "content": "a"}
ANSWER = {"input": "q", "output": "a", "label": 1}
CASES = {
    "a side that is no text": (
        "train_rm --prompt_key prompt",
        [PAIR | {"rejected": 7}, PAIR | {"rejected": 8}],
        "row 2: 'rejected' is 8, not text. Write it as \"8\"",
    ),
    "only identical pairs": (
        "train_dpo --prompt_key prompt",
        [PAIR | {"rejected": "good"}] * 2,
        "chosen and rejected are the same: 2",
    ),
    "a key that one row lacks": (
        "train_sft --output_key output",
        [ANSWER, {"output": "a"}],
        "row 2: 'input' is missing, not text",
    ),
    "roles out of turn": (
        "train_sft --input_key messages --apply_chat_template",
        [{"messages": [QUESTION, REPLY]}, {"messages": [QUESTION, QUESTION, REPLY]}],
        "row 2: message 2 is the user's, after the user's",
    ),
    "an over-long row where that is an error": (
        "train_sft --output_key output --max_len 30 --overlong_rows error",
        [ANSWER, ANSWER | {"output": "a" * 99}],
        "row 2: 119 tokens, over the limit of 30",
    ),
    "an id for the second time": (
        "train_sft --output_key output",
        [ANSWER | {"id": "a"}, ANSWER | {"id": "b"}, ANSWER | {"id": "a"}],
        "rows.jsonl: row 3: id 'a' is that of {folder}/rows.jsonl: row 1, too",
    ),
    "roles out of turn in a blend of two": (
        "train_sft --dataset {folder}/rows.jsonl,{folder}/rows.jsonl --dataset_probs 0.5,0.5",
        [{"messages": [QUESTION, REPLY]}, {"messages": [QUESTION, QUESTION, REPLY]}],
        "{folder}/rows.jsonl: row 2: message 2 is the user's, after the user's",
    ),
    "message lists where the tokenizer has no template": (
        "train_dpo --pretrain {folder}/untemplated",
        [{"prompt": [QUESTION], "chosen": [REPLY], "rejected": [REPLY]}],
        "'prompt' holds message lists, but the tokenizer {folder}/untemplated has no chat "
        "template. Give one with --tokenizer_chat_template",
    ),
}


ROWS = [{"input": "q", "output": "a"}] * 2
# Flags of train_sft, rows, and the whole line.
SFT_CASES = {
    "a model that is not there": (
        "--pretrain {folder}/none --output_key output",
        ROWS,
        "--pretrain {folder}/none does not exist. Type a folder with a config.json, or a hub id "
        "such as org/name.",
    ),
    "a question column that is not there": (
        "--input_key question --output_key output",
        ROWS,
        "column 'question' is not in the data set; columns found: input, output. Give the right "
        "one with --input_key.",
    ),
    "only over-long rows": (
        "--output_key output --max_len 8",
        [{"input": "q" * 50, "output": "a"}] * 3,
        "none of 3 rows can be learned from (over-long: 3). Check --input_key, --output_key and "
        "--max_len.",
    ),
}


@pytest.fixture
def refuse_rows(tiny_model_dir: Path, tmp_path: Path, refuse: Callable) -> Callable:
    """Runs a command on rows; answers its exit code and what it said."""

    def run(words: list[str], rows: list[dict]) -> tuple[object, str]:
        data = write_jsonl(tmp_path / "rows.jsonl", rows)
        paths = ["--pretrain", str(tiny_model_dir), "--dataset", str(data)]
        batch = ["--save_path", str(tmp_path / "run"), "--train_batch_size", "2"]
        return refuse(words[0], [*paths, *batch, *words[1:]])

    return run


@pytest.mark.parametrize("case", CASES)
def test_a_bad_row_is_named_before_a_model_is_loaded(
    case: str, tiny_model_dir: Path, tmp_path: Path, refuse_rows
) -> None:
    words, rows, expected = CASES[case]
    names = {"folder": tmp_path}
    shutil.copytree(tiny_model_dir, tmp_path / "untemplated")
    (tmp_path / "untemplated" / "chat_template.jinja").unlink()
    code, error = refuse_rows(words.format(**names).split(), rows)
    assert code == 2, error
    assert "Traceback" not in error
    assert expected.format(**names) in error


def test_bad_rows_of_both_sets_are_said_together(tmp_path: Path, refuse_rows) -> None:
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [ANSWER, ANSWER | {"input": " "}])
    flags = ["--output_key", "output", "--eval_dataset", str(held_out)]
    code, error = refuse_rows(["train_sft", *flags], [ANSWER | {"input": ""}, ANSWER])
    assert code == 2
    assert error.splitlines() == [
        "error: data set: 1 bad rows. Repair the rows, or choose other columns.",
        f"error: {tmp_path}/rows.jsonl: row 1: 'input' is empty",
        "error: evaluation: data set: 1 bad rows. Repair the rows, or choose other columns.",
        f"error: {held_out}: row 2: 'input' is empty",
    ]


def test_bad_prompts_of_both_sets_are_said_together(
    tiny_model_dir: Path, tmp_path: Path, refuse
) -> None:
    rows = [{"prompt": [QUESTION], "id": 3}, {"prompt": [QUESTION | {"content": " "}], "id": 4}]
    prompts = write_jsonl(tmp_path / "prompts.jsonl", rows)
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [rows[0]] * 2)
    flags = "--advantage_estimator group_norm --n_samples_per_prompt 2 --vllm_num_engines 0 "
    flags += f"--pretrain {tiny_model_dir} --prompt_data {prompts} --eval_dataset {held_out} "
    flags += f"--remote_rm_url http://localhost:1 --save_path {tmp_path / 'run'} "
    flags += "--rollout_batch_size 2 --train_batch_size 2 --micro_train_batch_size 1 "
    code, said = refuse("train_ppo", f"{flags} --generate_max_len 8 --prompt_max_len 99".split())
    errors = [line for line in said.splitlines() if "error: " in line]
    assert code == 2
    assert f"error: {prompts}: row 2: 'prompt' is empty" in errors
    assert f"error: {held_out}: row 2: id 3 is that of {held_out}: row 1, too" in errors


@pytest.mark.parametrize("case", SFT_CASES)
def test_wrong_input_of_sft_is_one_line_before_a_model_is_loaded(
    case: str, tmp_path: Path, refuse_rows
) -> None:
    words, rows, expected = SFT_CASES[case]
    code, error = refuse_rows(["train_sft", *words.format(folder=tmp_path).split()], rows)
    assert (code, error) == (2, f"error: {expected.format(folder=tmp_path)}\n")
