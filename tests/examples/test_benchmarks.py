"""A benchmark runs rarely, and would be found broken late: it runs here at its smallest size."""

from pathlib import Path

import pytest

from benchmarks import controller, real_shapes, run, saving
from benchmarks.supervised import packed


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


def test_what_the_controller_does_for_a_step_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["controller", "--samples", "64", "--ranks", "4"])
    controller.main()
    *_, row = capsys.readouterr().out.splitlines()
    assert row.startswith("shares_of_a_forward=") and " ms_per_100=" in row


def test_rows_are_packed_in_order_into_micro_batches() -> None:
    assert packed([1000, 1000, 49, 2048, 5]) == [[1000, 1000], [49], [2048], [5]]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", run.SUPERVISED)
def test_a_supervised_step_is_compared_with_its_matrix_products_and_attention(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.compare_with_limit(run.Bench(tmp_path, rounds=1), kind)
    name, _, rest = capsys.readouterr().out.partition("limit / ours")
    assert name == f"{kind.upper()} step: "
    assert 0.2 < float(rest.split()[0]) < 1.2
