"""Data and models that a supervised command cannot train on end it with one list of lines and exit
code 2, before a model is loaded. Details of rows and files stand in `tests/datasets`.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from openrlhf.datasets import loading
from openrlhf.errors import ConfigError
from tests.tiny import make_model, write_jsonl

LATE = 150  # a row behind more than a hundred good ones
NUM_POSITIONS = 64
QUESTION = {"role": "user", "content": "q"}
REPLY = {"role": "assistant", "content": "a"}
COMMANDS = {
    "sft": "--input_key input --output_key output",
    "rm": "--prompt_key input",
    "dpo": "--prompt_key input",
    "kto": "--input_key input --output_key output",
    "prm": "--input_key steps --label_key labels --placeholder_token # --reward_tokens + -",
    "kd": "--input_key input --output_key output --teacher_model {model}",
}
CHATS = "--input_key messages --output_key none --apply_chat_template"


def make_row(text: str = "a", **others: object) -> dict:
    """A row that every command can read; in a pair the rejected answer holds the text."""
    row = {"input": "q", "output": text, "chosen": "a!", "rejected": text, "label": 1}
    return row | {"steps": f"{text}#", "labels": ["+"]} | others


# Command, flags, rows, and a part of what is said.
CASES = {
    "a side that is no text": (
        "rm",
        "",
        [make_row(rejected=7), make_row(rejected=8)],
        "row 2: 'rejected' is 8, not text. Write it as \"8\"",
    ),
    "a prompt of white space": ("sft", "", [make_row(), make_row(input=" \n")], "row 2: 'input'"),
    "a label that is neither 1 nor 0": ("kto", "", [make_row(), make_row(label=2)], "row 2"),
    "only identical pairs": (
        "dpo",
        "",
        [make_row(rejected="a!")] * 2,
        "chosen and rejected are the same: 2",
    ),
    "an over-long row where that is an error": (
        "kd",
        "--max_len 30 --overlong_rows error",
        [make_row(), make_row("a" * 99)],
        "row 2: 119 tokens, over the limit of 30",
    ),
    "only over-long rows": (
        "sft",
        "--max_len 8",
        [make_row("q" * 50)] * 3,
        "none of 3 rows can be learned from (over-long: 3). Check --input_key, --output_key and "
        "--max_len.",
    ),
    "an id for the second time": (
        "sft",
        "",
        [make_row(id="a"), make_row(id="b"), make_row(id="a")],
        "rows.jsonl: row 3: id 'a' is that of {folder}/rows.jsonl: row 1, too",
    ),
    "roles out of turn in a blend of two": (
        "sft",
        f"{CHATS} --dataset {{folder}}/rows.jsonl,{{folder}}/rows.jsonl --dataset_probs 0.5,0.5",
        [{"messages": [QUESTION, REPLY]}, {"messages": [QUESTION, QUESTION, REPLY]}],
        "{folder}/rows.jsonl: row 2: message 2 is the user's, after the user's",
    ),
    "message lists where the tokenizer has no template": (
        "dpo",
        "--pretrain {folder}/untemplated",
        [make_row(input=[QUESTION], chosen=[REPLY], rejected=[REPLY | {"content": "b"}])],
        "tokenizer {folder}/untemplated has no chat template. Give one with "
        "--tokenizer_chat_template",
    ),
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
    """Runs a command on rows, or on a file of them; returns the lines of its one list."""

    def run(command: str, model: Path, rows: list[dict] | Path, *more: str) -> list[str]:
        data = rows if isinstance(rows, Path) else write_jsonl(tmp_path / "rows.jsonl", rows)
        paths = f"--pretrain {model} --dataset {data} --save_path {tmp_path / 'run'}"
        words = f"{paths} --train_batch_size 2 {COMMANDS[command].format(model=model)}"
        code, said = refuse(f"train_{command}", [*words.split(), *more])
        assert code == 2, said
        assert "Traceback" not in said
        return [line[7:] for line in said.splitlines() if line.startswith("error: ")]

    return run


@pytest.mark.parametrize("case", CASES)
def test_a_bad_row_is_named(case: str, tiny_model_dir: Path, tmp_path: Path, refuse_rows) -> None:
    command, flags, rows, expected = CASES[case]
    shutil.copytree(tiny_model_dir, tmp_path / "untemplated")
    (tmp_path / "untemplated" / "chat_template.jinja").unlink()
    lines = refuse_rows(command, tiny_model_dir, rows, *flags.format(folder=tmp_path).split())
    assert any(expected.format(folder=tmp_path) in line for line in lines), lines


def test_bad_rows_of_both_sets_are_said_together(
    tiny_model_dir: Path, tmp_path: Path, refuse_rows
) -> None:
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [make_row(), make_row(input=" ")])
    rows = [make_row(input=""), make_row()]
    assert refuse_rows("sft", tiny_model_dir, rows, "--eval_dataset", str(held_out)) == [
        "data set: 1 bad rows. Repair the rows, choose other columns, or type "
        "--bad_rows skip to leave these out.",
        f"{tmp_path}/rows.jsonl: row 1: 'input' is empty",
        "evaluation: data set: 1 bad rows. Repair the rows, choose other columns, or type "
        "--bad_rows skip to leave these out.",
        f"{held_out}: row 2: 'input' is empty",
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


def test_rows_that_a_file_lost_are_noticed_where_their_number_or_hash_is_given(
    tmp_path: Path,
) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", [make_row()] * 4)
    two = write_jsonl(tmp_path / "two.jsonl", [make_row()])
    digests = [hashlib.sha256(path.read_bytes()).hexdigest().upper() for path in (one, two)]
    right = {"expect_rows": "4, 1", "expect_sha256": ",".join(digests)}
    assert len(loading.load_rows(f"{one},{two}", max_samples=2, **right)) == 2
    for wrong, message in (
        ({"expect_rows": "4"}, "--expect_rows 4 is of 1 data sets, and 2 are named"),
        ({"expect_rows": "4,x"}, "two.jsonl has 1 rows, not x"),
        ({"expect_rows": "4,2"}, "two.jsonl has 1 rows, not 2"),
        ({"expect_sha256": f"{digests[0]},0"}, "two.jsonl has the SHA-256 .*, not 0."),
    ):
        with pytest.raises(ConfigError, match=message):
            loading.load_rows(f"{one},{two}", **wrong)


@pytest.mark.parametrize("command", ["sft", "dpo", "prm"])
def test_a_row_longer_than_the_positions_is_refused(
    command: str, root: Path, tmp_path: Path, refuse_rows
) -> None:
    rows = [make_row()] * LATE + [make_row("b" * 100), make_row("b" * 80)]
    [line] = refuse_rows(command, root / "short", rows)
    start = f"2 of 152 rows are longer than the 64 positions of the model {root}/short: "
    assert line.startswith(f"{start}{tmp_path}/rows.jsonl: row {LATE + 1} has 1")
    assert f"tokens. Type --max_len {NUM_POSITIONS}, or set max_position_embeddings" in line


@pytest.mark.parametrize("command", ["sft", "rm", "prm"])
def test_an_id_without_an_embedding_is_found_in_a_late_row(
    command: str, root: Path, tmp_path: Path, refuse_rows
) -> None:
    rows = [make_row()] * LATE + [make_row("\u00ad"), make_row()]
    assert refuse_rows(command, root / "narrow", rows) == [
        f"{tmp_path}/rows.jsonl: row {LATE + 1} has token id 261, and the model "
        f"{root}/narrow has 261 embeddings. Use a model whose folder holds its own tokenizer, or "
        "give it embeddings for the tokens that were added."
    ]


@pytest.mark.parametrize(
    ("command", "flag"), [("dpo", "--ref_pretrain"), ("kd", "--teacher_model")]
)
def test_another_model_that_reads_the_rows_has_places_for_them(
    root: Path, tiny_model_dir: Path, refuse_rows, command: str, flag: str
) -> None:
    rows = [make_row("b" * 100)]
    [line] = refuse_rows(command, tiny_model_dir, rows, flag, str(root / "short"))
    assert f"1 of 1 rows are longer than the 64 positions of the model {root}/short" in line


def test_what_is_wrong_with_models_and_with_rows_is_said_together(root: Path, refuse_rows) -> None:
    more = "--label_key gold --aux_loss_coef 0.1 --attn_implementation flash_attention_3"
    kernel, experts, label = refuse_rows("kto", root / "short", [make_row()], *more.split())
    assert kernel.startswith("--attn_implementation flash_attention_3: ")
    assert experts == f"--aux_loss_coef is set, and {root}/short has no experts. Leave it out."
    assert "column 'gold' is not in the data set" in label


def test_a_model_without_a_tokenizer_hides_no_column(
    tiny_model_dir: Path, tmp_path: Path, refuse_rows
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((tiny_model_dir / "config.json").read_text())
    tokenizer, column = refuse_rows("sft", model, [make_row()], "--output_key", "gold")
    assert str(model) in tokenizer
    assert "column 'gold' is not in the data" in column
