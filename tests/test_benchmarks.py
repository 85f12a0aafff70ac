"""What a benchmark compares with: TRL at its best."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import run

# Seconds of a step of TRL's by its micro-batch: padded less in small ones, slower in the smallest.
TRL = {4: 5.0, 8: 3.0, 16: 4.0, 64: 6.0, 128: 2.0}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    asked = []

    def measure(name: str, folder: Path, *numbers: int, module: str = "measures") -> dict:
        asked.append((name, *numbers))
        seconds = TRL[numbers[-1]] if "trl" in name else 1.0
        return {"seconds": seconds, "tokens": 600.0}

    monkeypatch.setattr(run, "measure", measure)
    return asked


def test_supervised_rows_take_trl_at_its_fastest_micro_batch_and_name_it(
    asked: list[tuple], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.compare_supervised(run.Bench(tmp_path, 2), "sft")
    assert asked[:4] == [("trl_sft", size) for size in (4, 8, 16, 64)]
    assert asked[4:] == [("ours_sft",), ("trl_sft", 8)] * 2
    line = capsys.readouterr().out
    assert "   3.00 " in line
    assert line.endswith("600 against 200 tokens/s, TRL's micro-batch: 8\n")


def test_whole_steps_take_trl_at_its_fastest_micro_batch_and_name_it(
    asked: list[tuple], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.compare_with_trl(run.Bench(tmp_path, 1), 64, 1.2)
    assert asked[:4] == [("step_trl", 64, 256, size) for size in (4, 8, 16, 128)]
    assert asked[4:] == [("step_local", 64, 256), ("step_trl", 64, 256, 128), ("step", 64, 256)]
    assert capsys.readouterr().out.count("1.00 against 2.00 s a step, TRL's micro-batch: all") == 2
