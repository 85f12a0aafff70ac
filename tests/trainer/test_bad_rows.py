"""Rows that cannot be learned from, and other wrong input of train_sft, end a command with
their line and exit code 2, before a model is loaded.
"""

from __future__ import annotations

from importlib import import_module
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
        "row 1",
    ),
    "only identical pairs": (
        "train_dpo --prompt_key prompt",
        [PAIR | {"rejected": "good"}] * 2,
        "chosen and rejected are the same: 2",
    ),
    "a missing column": (
        "train_dpo --prompt_key prompt",
        [{"prompt": "p", "chosen": "c"}],
        "rejected",
    ),
    "a margin that is no number": (
        "train_rm --prompt_key prompt --margin_loss",
        [PAIR | {"margin": 1.0}, PAIR | {"margin": None}],
        "row 1",
    ),
    "a label that is neither 1 nor 0": (
        "train_kto --output_key output",
        [ANSWER, ANSWER | {"label": 2}],
        "row 1",
    ),
    "a label too few": (
        "train_prm --input_key text --label_key labels --placeholder_token # --reward_tokens + -",
        [{"text": "a # b #", "labels": ["+", "-"]}, {"text": "a # b #", "labels": ["+"]}],
        "row 1",
    ),
    "a label that is missing": (
        "train_kto --output_key output",
        [ANSWER, {"input": "q", "output": "a"}],
        "row 1: 'label' is None; labels are 1 and 0",
    ),
    "a key that one row lacks": (
        "train_sft --output_key output",
        [ANSWER, {"output": "a"}],
        "row 1: 'input' is missing, not text",
    ),
    "a prompt of white space": (
        "train_sft --output_key output",
        [ANSWER, ANSWER | {"input": " \n"}],
        "row 1: 'input' is empty",
    ),
    "an unknown role": (
        "train_sft --input_key messages --apply_chat_template",
        [{"messages": [QUESTION, REPLY]}, {"messages": [QUESTION | {"role": "king"}, REPLY]}],
        "row 1: unknown role 'king'",
    ),
    "roles out of turn": (
        "train_sft --input_key messages --apply_chat_template",
        [{"messages": [QUESTION, REPLY]}, {"messages": [QUESTION, QUESTION, REPLY]}],
        "row 1: message 2 is the user's, after the user's",
    ),
    "an over-long row where that is an error": (
        "train_sft --output_key output --max_len 30 --overlong_rows error",
        [ANSWER, ANSWER | {"output": "a" * 99}],
        "row 1: 119 tokens, over the limit of 30",
    ),
    "an answer column that is not there": (
        "train_kd --teacher_model {model} --output_key answer",
        [{"input": "q", "output": "a"}],
        "answer",
    ),
}


ROWS = [{"input": "q", "output": "a"}] * 2
# Flags of train_sft, rows, and the whole line.
SFT_CASES = {
    "a model that is not there": (
        "--pretrain {folder}/none --output_key output",
        ROWS,
        "Model path '{folder}/none' does not exist. Give a folder with a config.json, or a hub id "
        "such as org/name.",
    ),
    "a data set that is not there": (
        "--dataset {folder}/none.jsonl --output_key output",
        ROWS,
        "data set {folder}/none.jsonl does not exist. Give a file (.jsonl, .json, .jsonl.gz, "
        ".json.gz, .csv, .parquet, .arrow), a folder of them, or a hub name.",
    ),
    "an empty data set": (
        "--output_key output",
        [],
        "{folder}/rows.jsonl is empty: 0 rows. Give a file that has rows.",
    ),
    "a question column that is not there": (
        "--input_key question --output_key output",
        ROWS,
        "column 'question' is not in the data set; columns found: input, output. Give the right "
        "one with --input_key.",
    ),
    "an answer column that is not there": (
        "--output_key answer",
        ROWS,
        "column 'answer' is not in the data set; columns found: input, output. Give the right one "
        "with --output_key.",
    ),
    "only over-long rows": (
        "--output_key output --max_len 8",
        [{"input": "q" * 50, "output": "a"}] * 3,
        "none of 3 rows can be learned from (over-long: 3). Check --input_key, --output_key and "
        "--max_len.",
    ),
    "chats without an answer": (
        "--input_key messages --apply_chat_template",
        [{"messages": [{"role": "user", "content": "q"}]}] * 2,
        "none of 2 rows can be learned from (no assistant turn: 2). Check --input_key, "
        "--output_key and --max_len.",
    ),
    "a micro-batch larger than the batch": (
        "--output_key output --micro_train_batch_size 4",
        ROWS,
        "--micro_train_batch_size 4 is more than --train_batch_size 2. Type "
        "--micro_train_batch_size 2 or --train_batch_size 4.",
    ),
}


@pytest.fixture
def refuse(tiny_model_dir: Path, tmp_path: Path, capsys, monkeypatch):
    """Runs a command on rows; answers its exit code and what it said."""
    # Weights that cannot be read: a command that got as far would say so.
    monkeypatch.setattr("openrlhf.models.loading.from_pretrained_kwargs", None)

    def run(words: list[str], rows: list[dict]) -> tuple[object, str]:
        module, *flags = words
        data = write_jsonl(tmp_path / "rows.jsonl", rows)
        paths = ["--pretrain", str(tiny_model_dir), "--dataset", str(data)]
        batch = ["--save_path", str(tmp_path / "run"), "--train_batch_size", "2"]
        with pytest.raises(SystemExit) as exit_info:
            import_module(f"openrlhf.cli.{module}").main([*paths, *batch, *flags])
        return exit_info.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("case", CASES)
def test_a_bad_row_is_named_before_a_model_is_loaded(
    case: str, tiny_model_dir: Path, refuse
) -> None:
    words, rows, expected = CASES[case]
    code, error = refuse(words.format(model=tiny_model_dir).split(), rows)
    assert code == 2, error
    assert "Traceback" not in error
    assert expected in error


@pytest.mark.parametrize("case", SFT_CASES)
def test_wrong_input_of_sft_is_one_line_before_a_model_is_loaded(
    case: str, tmp_path: Path, refuse
) -> None:
    words, rows, expected = SFT_CASES[case]
    code, error = refuse(["train_sft", *words.format(folder=tmp_path).split()], rows)
    assert (code, error) == (2, f"error: {expected.format(folder=tmp_path)}\n")
