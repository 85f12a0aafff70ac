"""What the six supervised commands say before a model is loaded: rows that it cannot read, a loss
that is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from openrlhf.trainer.supervised_run import limits_of
from tests.tiny import make_model, write_jsonl

LATE = 150  # a row behind more than a hundred good ones
NUM_POSITIONS = 64
PRM = "--input_key steps --label_key labels --placeholder_token # --reward_tokens + -"
COMMANDS = {
    "sft": "--input_key input --output_key output",
    "rm": "--prompt_key input",
    "dpo": "--prompt_key input",
    "kto": "--input_key input --output_key output",
    "prm": PRM,
    "kd": "--input_key input --output_key output --teacher_model {teacher}",
}


def make_row(text: str) -> dict:
    """A row that every command can read; in a pair the rejected answer holds the text."""
    return {
        "input": "q",
        "output": text,
        "chosen": "a",
        "rejected": text,
        "label": 1,
        "steps": f"{text}#",
        "labels": ["+"],
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with few positions, and one without an embedding for the tokenizer's last token."""
    root = tmp_path_factory.mktemp("models")
    make_model(root / "short", max_position_embeddings=NUM_POSITIONS)
    make_model(root / "narrow", vocab_size=261)
    return root


@pytest.fixture
def refuse_rows(tmp_path: Path, refuse: Callable) -> Callable:
    """Runs a command on rows; answers its exit code and what it said."""

    def run(command: str, model: Path, rows: list[dict], *more: str) -> tuple[object, str]:
        data = write_jsonl(tmp_path / "rows.jsonl", rows)
        flags = COMMANDS[command].format(teacher=model).split()
        paths = f"--pretrain {model} --dataset {data} --save_path {tmp_path / 'run'}".split()
        return refuse(f"train_{command}", [*paths, *flags, *more])

    return run


@pytest.mark.parametrize("command", ["sft", "dpo", "prm"])
def test_a_row_longer_than_the_positions_is_refused(
    command: str, root: Path, tmp_path: Path, refuse_rows
) -> None:
    rows = [make_row("a")] * LATE + [make_row("b" * 100), make_row("b" * 80)]
    code, error = refuse_rows(command, root / "short", rows)
    assert code == 2, error
    [line] = error.splitlines()
    start = "error: 2 of 152 rows are longer than the 64 positions of the model "
    assert line.startswith(f"{start}{root}/short: {tmp_path}/rows.jsonl: row {LATE + 1} has 1")
    assert f"tokens. Type --max_len {NUM_POSITIONS}, or set max_position_embeddings" in line


@pytest.mark.parametrize("command", ["sft", "rm", "prm"])
def test_an_id_without_an_embedding_is_found_in_a_late_row(
    command: str, root: Path, tmp_path: Path, refuse_rows
) -> None:
    rows = [make_row("a")] * LATE + [make_row("\u00ad"), make_row("a")]
    code, error = refuse_rows(command, root / "narrow", rows)
    assert (code, error) == (
        2,
        f"error: {tmp_path}/rows.jsonl: row {LATE + 1} has token id 261, and the model "
        f"{root}/narrow has 261 embeddings. Use a model whose folder holds its own tokenizer, or "
        "give it embeddings for the tokens that were added.\n",
    )


@pytest.mark.parametrize(
    ("command", "flags"),
    [("dpo", "--ref_pretrain {short}"), ("kd", "--teacher_model {short}")],
)
def test_another_model_that_reads_the_rows_has_places_for_them(
    root: Path,
    tiny_model_dir: Path,
    refuse_rows,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    flags: str,
) -> None:
    monkeypatch.setitem(COMMANDS, "kd", "--input_key input --output_key output")
    more = flags.format(short=root / "short").split()
    code, error = refuse_rows(command, tiny_model_dir, [make_row("b" * 100)], *more)
    assert code == 2
    assert f"1 of 1 rows are longer than the 64 positions of the model {root}/short" in error


def test_a_student_does_not_answer_beyond_the_positions_of_either(
    root: Path, tiny_model_dir: Path, refuse_rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "kd", "--input_key input --output_key output")
    more = f"--teacher_model {root / 'short'} --kd_on_policy --max_len 65".split()
    code, error = refuse_rows("kd", tiny_model_dir, [make_row("a")], *more)
    assert (code, error) == (
        2,
        f"error: --kd_on_policy samples up to --max_len 65 tokens, and {root}/short has 64 "
        "positions. Type --max_len 64.\n",
    )


def test_the_sizes_of_a_model_are_those_of_its_config() -> None:
    # Learnt positions with another name in the file; positions without end; text beside images.
    found = [
        limits_of(transformers.GPT2Config(n_positions=99, vocab_size=7), "m"),
        limits_of(transformers.BloomConfig(vocab_size=7), "m"),
        limits_of(transformers.Gemma3Config(text_config={"max_position_embeddings": 5}), "m"),
    ]
    assert [limits.num_positions for limits in found] == [99, None, 5]
    assert [limits.num_embeddings for limits in found] == [7, 7, 262208]


def test_what_is_wrong_with_models_and_with_rows_is_said_together(root: Path, refuse_rows) -> None:
    more = "--label_key gold --aux_loss_coef 0.1 --attn_implementation flash_attention_3"
    code, error = refuse_rows("kto", root / "short", [make_row("a")], *more.split())
    kernel, experts, label = error.splitlines()
    assert code == 2
    assert kernel.startswith("error: --attn_implementation flash_attention_3: ")
    assert (
        experts == f"error: --aux_loss_coef is set, and {root}/short has no experts. Leave it out."
    )
    assert "column 'gold' is not in the data set" in label


@pytest.mark.parametrize(
    ("command", "flags", "names"),
    [
        ("sft", "--input_key q --output_key a", ["q", "a"]),
        ("dpo", "--prompt_key q --chosen_key good --rejected_key bad", ["good", "bad", "q"]),
        ("prm", "--input_key q --label_key gold", ["q", "gold"]),
    ],
)
def test_all_columns_that_are_not_there_are_named(
    command: str, flags: str, names: list[str], tiny_model_dir: Path, refuse_rows
) -> None:
    code, error = refuse_rows(command, tiny_model_dir, [make_row("a")], *flags.split())
    assert code == 2
    said = [line.split("'")[1] for line in error.splitlines()]
    assert said == names, error


def test_flags_that_conflict_a_wrong_path_and_a_wrong_column_are_one_list(refuse_rows) -> None:
    more = "--train_batch_size 1 --label_key gold"
    code, error = refuse_rows("kto", Path("/nowhere/model"), [make_row("a")], *more.split())
    sizes, model, label = error.splitlines()
    assert code == 2
    assert sizes.startswith("error: --train_batch_size must be at least 2: 1.")
    assert model.startswith("error: --pretrain /nowhere/model does not exist")
    assert label.startswith("error: column 'gold' is not in the data set")


def test_a_model_without_a_tokenizer_hides_no_column(
    tiny_model_dir: Path, tmp_path: Path, refuse_rows
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((tiny_model_dir / "config.json").read_text())
    code, error = refuse_rows("sft", model, [make_row("a")], "--output_key", "gold")
    tokenizer, column = error.splitlines()
    assert code == 2
    assert str(model) in tokenizer
    assert "column 'gold' is not in the data" in column
