"""Flash attention that does not run is said once, to those who asked for it or lack its package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from openrlhf.config.cli import parse_config
from openrlhf.config.supervised import SFTConfig
from openrlhf.models import attention_note
from openrlhf.models.attention_note import say_attention

NEEDS = ["--pretrain", "m", "--dataset", "d"]


@pytest.mark.parametrize(
    ("words", "has_gpu", "has_package", "said"),
    [
        ("", False, False, ""),
        ("--flash_attn", False, False, "flash_attention_2 needs a GPU: "),
        ("--attn_implementation sdpa", False, False, ""),
        ("", True, False, "flash-attn is not installed: "),
        ("--flash_attn", True, False, "flash-attn is not installed: "),
        ("--attn_implementation sdpa", True, False, ""),
        ("--flash_attn", True, True, ""),
        ("--attn_implementation eager", True, True, "eager attention is not for packed rows: "),
        ("--attn_implementation eager", False, False, "eager attention is not for packed rows: "),
    ],
)
def test_what_is_said_of_flash_attention(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_model_dir: Path,
    words: str,
    said: str,
    *,
    has_gpu: bool,
    has_package: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(attention_note, "has_flash_attention", lambda: has_package)
    config = parse_config(SFTConfig, [*NEEDS, *words.split()]).config
    say_attention(config, config.ds.attn_implementation, [str(tiny_model_dir)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == bool(said)
    assert all(line.startswith(said) and "(SDPA)" in line for line in lines)
