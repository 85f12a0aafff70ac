"""A benchmark runs rarely, and would be found broken late: it runs here at its smallest size."""

from pathlib import Path

import pytest

from benchmarks import real_shapes, saving


def test_steps_beside_a_save_are_measured_whether_it_is_waited_for_or_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["saving", "--hidden_size", "32"])
    saving.main()
    said = [line for line in capsys.readouterr().out.splitlines() if "beside a save" in line]
    assert len(said) == 2
    assert " GB in the background: a step takes " in said[0]
    assert " GB waited for: a step takes " in said[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_ratio_at_real_shapes_is_said_with_its_goal(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"--model {tiny_model_dir} --new-tokens 8 --dtypes fp32 --prompts 1 --rows 4"
    words += " --trl-micro-batches 8"
    monkeypatch.setattr("sys.argv", ["real_shapes", *words.split()])
    real_shapes.main()
    said = [line for line in capsys.readouterr().out.splitlines() if "  goal " in line]
    names = ["update: limit / ours", "step with vLLM / bare parts"]
    for kind in ("GRPO", "SFT", "DPO"):
        names += [f"{kind} step: TRL / ours", f"{kind} step: peak memory, ours / TRL's"]
    assert [line.split(", fp32")[0] for line in said] == names
