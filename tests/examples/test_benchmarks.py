"""A benchmark runs rarely, and would be found broken late: it runs here at its smallest size."""

import pytest

from benchmarks import saving


def test_steps_beside_a_save_are_measured_whether_it_is_waited_for_or_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["saving", "--hidden_size", "32"])
    saving.main()
    said = [line for line in capsys.readouterr().out.splitlines() if "beside a save" in line]
    assert len(said) == 2
    assert " GB in the background: a step takes " in said[0]
    assert " GB waited for: a step takes " in said[1]
