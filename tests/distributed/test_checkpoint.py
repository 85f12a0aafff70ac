"""A folder counts as a checkpoint only when its manifest agrees with its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.distributed.checkpoint import commit, verify
from openrlhf.errors import CheckpointError


def write(folder: Path) -> Path:
    (folder / "states").mkdir(parents=True)
    (folder / "states" / "model.pt").write_text("weights")
    (folder / "loop.json").write_text("{}")
    return folder


def test_a_committed_folder_has_its_name_and_verifies(tmp_path: Path) -> None:
    commit(write(tmp_path / "tmp-step3"), tmp_path / "step3")
    verify(tmp_path / "step3")
    assert [path.name for path in tmp_path.iterdir()] == ["step3"]


def test_a_checkpoint_of_the_same_tag_is_replaced(tmp_path: Path) -> None:
    commit(write(tmp_path / "tmp-step3"), tmp_path / "step3")
    (write(tmp_path / "tmp-step3") / "more").write_text("new")
    commit(tmp_path / "tmp-step3", tmp_path / "step3")
    verify(tmp_path / "step3")
    assert (tmp_path / "step3" / "more").read_text() == "new"


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        verify(write(tmp_path / "step3"))


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    commit(write(tmp_path / "tmp-step3"), tmp_path / "step3")
    file = tmp_path / "step3" / "states" / "model.pt"
    if damage == "missing":
        file.unlink()
    else:
        file.write_text("wei")
    with pytest.raises(CheckpointError, match=r"states/model\.pt"):
        verify(tmp_path / "step3")
