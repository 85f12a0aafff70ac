"""A supervised method is a recipe with its config class, and an entry in the register."""

from pathlib import Path

import pytest

from openrlhf import api
from openrlhf.cli import check
from openrlhf.cli.main import command
from openrlhf.config.methods import METHODS, Method
from openrlhf.report.run_folder import read_runs
from openrlhf.utils.tracker import read_metrics
from tests.helpers.focal import FocalConfig
from tests.tiny import write_jsonl

FOCAL = Method(
    "looks at unlikely tokens",
    "tests.helpers.focal:FocalConfig",
    "tests.helpers.focal:FocalTrainer",
)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_a_function_of_python_under_its_own_name(name: str) -> None:
    assert getattr(api, name).method is METHODS[name]


def test_an_unknown_name_is_none_of_the_functions() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        api.nothing  # noqa: B018 - it is to be looked up


def test_an_entry_makes_a_method_a_command_that_checks_trains_and_reports(
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(METHODS, "focal", FOCAL)
    monkeypatch.setattr(check, "CHECKED", ("focal",))
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(8)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    words = f"--pretrain {tiny_model_dir} --dataset {data} --save_path {tmp_path / 'run'} "
    words += "--focal_power 0 --train_batch_size 4 --max_epochs 1"
    command("focal")(["--help"])
    assert "--focal_power" in capsys.readouterr().out
    check.main(["focal", *words.split()])
    assert "no problem was found" in capsys.readouterr().out
    command("focal")(words.split())
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    # At power 0 the loss is that of fine-tuning.
    assert all(record["focal_loss"] == pytest.approx(record["gpt_loss"]) for record in records)
    [run] = read_runs([tmp_path / "run"])
    assert run.command is FocalConfig
    assert api.focal.config(pretrain="m", dataset="d").model.focal_power == 2.0
