"""Rows that cannot be learned from end a command with their line and exit code 2, before a model is
loaded.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.tiny import write_jsonl

PAIR = {"prompt": "p", "chosen": "good", "rejected": "bad"}
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
    "an answer column that is not there": (
        "train_kd --teacher_model {model} --output_key answer",
        [{"input": "q", "output": "a"}],
        "answer",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_row_is_named_before_a_model_is_loaded(
    case: str, tiny_model_dir: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    words, rows, expected = CASES[case]
    module, *flags = words.format(model=tiny_model_dir).split()
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    paths = ["--pretrain", str(tiny_model_dir), "--dataset", str(data)]
    # Weights that cannot be read: a command that got as far would say so.
    monkeypatch.setattr("openrlhf.models.loading.from_pretrained_kwargs", None)
    with pytest.raises(SystemExit) as exit_info:
        import_module(f"openrlhf.cli.{module}").main(
            [*paths, *flags, "--save_path", str(tmp_path / "run"), "--train_batch_size", "2"]
        )
    error = capsys.readouterr().err
    assert exit_info.value.code == 2, error
    assert "Traceback" not in error
    assert expected in error
