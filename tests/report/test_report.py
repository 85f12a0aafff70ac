"""`openrlhf report`: the page, the server, and what the end of a run writes."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from matplotlib.figure import Figure

from openrlhf.cli.main import main
from openrlhf.commands import train_rl
from openrlhf.config.cli import parse_config, save_resolved
from openrlhf.config.evaluation import EvaluateConfig
from openrlhf.config.supervised import KTOConfig, SFTConfig
from openrlhf.distributed.folders import set_earlier_run_aside
from openrlhf.errors import ConfigError
from openrlhf.report.curves import Curve, Panel
from openrlhf.report.page import settings
from openrlhf.report.picture import _draw
from openrlhf.report.report import reporting, write_report
from openrlhf.report.run_folder import read_runs
from openrlhf.report.server import make_app
from tests.integration.ppo_runs import GRPO, make_inputs, start
from tests.report.run_folders import ATTACK, make_run, write_metrics

TAUGHT_NOTHING = (
    "1 of 3 logged steps taught nothing: all samples of every prompt got the same reward"
)


class Tags(HTMLParser):
    """The tags of a page with their attributes, as a browser reads them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))


def report(*words: object) -> None:
    main(["report", *map(str, words)])


def policy_of(page: str) -> str:
    """What the page allows itself to load."""
    return next(of["content"] for _, of in Tags(page).found if "content" in of)


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_a_page_has_curves_samples_and_settings_and_nothing_of_another_place(tmp_path, capsys):
    report(make_run(tmp_path / "run"))
    page = (tmp_path / "run" / "report.html").read_text()
    picture = (tmp_path / "run" / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000
    assert capsys.readouterr().out.splitlines() == [
        "run: sums_pass1 0.25 ±0.12 (step 0) → 0.5 ±0.12 (step 3)",
        f"run: hint: {TAUGHT_NOTHING}",
        f"report: {tmp_path}/run/report.html",
        f"curves: {tmp_path}/run/curves.png",
    ]
    assert f"<td>{TAUGHT_NOTHING}</td>" in page
    data = data_of(page)
    assert {"reward", "KL", "memory", "loss"} <= {panel["title"] for panel in data["panels"]}
    samples = data["runs"][0]["samples"]
    assert len(samples) == data["runs"][0]["num_samples"] == 18
    assert ATTACK in [row["response"] for row in samples] and ATTACK not in page
    tags = Tags(page).found
    assert not [of for _, of in tags if of.get("src") or "//" in of.get("href", "")]
    assert [tag for tag, _ in tags].count("script") == 4  # no sample has made a fifth
    assert "connect-src 'none'" in policy_of(page) and "all samples of every prompt" in page


@pytest.mark.parametrize("name", ["eval_sums_pass1", "acc"])
def test_the_page_and_the_terminal_say_that_the_model_got_worse(name, tmp_path, capsys):
    values = {f"eval/{name}_stderr": 0.125}
    records = [{"step": step, f"eval/{name}": 1 / (step + 1)} | values for step in (0, 9, 10)]
    records += [{"step": 10, f"eval/{name}": None, f"eval/{name}_stderr": None}]
    write_metrics(tmp_path / "run", [*records, {"step": 10, "eval/loss": 0.5}])
    report(tmp_path / "run")
    name = name.removeprefix("eval_")
    told = (
        f"the model got worse: {name} fell from 1.000 ±0.125 at step 0 to 0.091 ±0.125 at step "
        "10, by more than two standard errors"
    )
    assert capsys.readouterr().out.splitlines()[-3] == f"run: hint: {told}"
    assert f"<td>{told}</td>" in (tmp_path / "run" / "report.html").read_text()


def test_a_run_has_one_colour_in_all_panels_of_the_picture():
    figure = Figure()
    for index, metrics in enumerate((["reward", "reward/format"], ["kl"])):
        curves = [Curve(run, metric, False, [1], [0.5]) for run in "ab" for metric in metrics]
        axis = figure.add_subplot(1, 2, index + 1)
        _draw(axis, Panel("title", "", "curves", curves), ["a", "b"])
        colours = [line.get_color() for line in axis.lines]
        assert colours == ["C0"] * len(metrics) + ["C1"] * len(metrics)


@pytest.mark.parametrize("num_metrics", [2, 9])
def test_the_legend_of_the_picture_covers_no_curve(num_metrics):
    curves = [
        Curve("a", f"reward/{i}", False, [1, 2, 3], [1.0, 0.0, 1.0], [0.1, None, 0.5])
        for i in range(num_metrics)
    ]
    axis = Figure((4.0, 2.8)).add_subplot()
    _draw(axis, Panel("title", "", "curves", curves), ["a"])
    _, highest = axis.transData.transform((0, 1.5))  # the end of an error bar
    assert axis.get_legend().get_window_extent().y0 > highest


def test_several_runs_show_which_settings_differ(tmp_path, capsys):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", learning_rate=2e-5)]
    report(*runs, "--output", tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert "<th>actor.adam.lr</th><td>1e-05</td><td>2e-05</td>" in page
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "both.html", "both.png"}
    assert capsys.readouterr().out.endswith(f"curves: {tmp_path}/both.png\n")


def test_settings_know_their_default_their_flags_and_whether_runs_differ(tmp_path):
    paths = [make_run(tmp_path / "a"), make_run(tmp_path / "b", learning_rate=1e-6)]
    rows = {row["name"]: row for row in settings(read_runs(paths))}
    rate = rows["actor.adam.lr"]
    assert (rate["values"], rate["default"]) == (["1e-05", "1e-06"], "1e-06")
    assert (rate["is_changed"], rate["is_same"]) == (True, False)
    assert "actor_learning_rate" in rate["other_names"].split()
    unknown = rows["seed"]  # of no command
    told = (unknown["default"], unknown["is_changed"], unknown["is_same"])
    assert told == ("", False, True)


@pytest.mark.parametrize(
    ("config_class", "words"),
    [
        (SFTConfig, ["--pretrain", "m", "--dataset", "d"]),
        (KTOConfig, ["--pretrain", "m", "--dataset", "d"]),
        (EvaluateConfig, ["--models", "m", "--prompt_data", "d", "--remote_rm_url", __file__]),
    ],
)
def test_only_what_was_typed_differs_from_the_default(config_class, words, tmp_path):
    config = parse_config(config_class, [*words, "--save_path", str(tmp_path)]).config
    save_resolved(config, tmp_path / "config.yaml")
    [run] = read_runs([tmp_path])
    assert run.command is config_class
    num_typed = len(words) // 2 + 1
    assert len([row for row in settings([run]) if row["is_changed"]]) == num_typed
    assert "d" in run.facts().values()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "No run is named. Type openrlhf report RUN"),
        (["missing"], "missing is no run folder: it has no metrics.jsonl"),
        (["missing", "--serve"], "missing is no run folder"),
        (["missing", "--serve", "--output", "x.html"], "--output with --serve"),
    ],
)
def test_what_is_no_run_is_said_in_a_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        report(*words)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_a_server_pages_and_speaks_to_this_machine_only(tmp_path):
    app = make_app([make_run(tmp_path / "run")])
    client = TestClient(app, base_url="http://127.0.0.1")
    page = client.get("/").text
    assert data_of(page)["runs"][0]["samples"] == []
    assert "connect-src 'self'" in policy_of(page)
    run = data_of(page)["runs"][0]["path"]
    query = {"run": run, "sort": "reward", "is_descending": True, "size": 1}
    found = client.get("/samples", params=query).json()
    assert (found["total"], found["rows"][0]["reward"]) == (18, 2.25)
    assert client.get("/groups", params={"run": run}).json()["total"] == 9
    place = {"run": run, "file": "step_000001.parquet", "number": 5}
    assert client.get("/sample", params=place).json()["tokens"]["token_ids"] == [5, 6, 7, 8, 9]
    assert client.get("/sample", params=place | {"number": 6}).status_code == 404
    assert client.get("/samples", params={"run": str(tmp_path)}).status_code == 404
    assert client.get("/", headers={"host": "elsewhere.example"}).status_code == 400


def test_a_run_that_comes_while_the_server_runs_has_its_own_samples(tmp_path):
    make_run(tmp_path / "qwen")
    client = TestClient(make_app([tmp_path]), base_url="http://127.0.0.1")
    [first] = data_of(client.get("/").text)["runs"]
    make_run(tmp_path / "grpo", num_steps=5)
    runs = data_of(client.get("/").text)["runs"]
    totals = [client.get("/samples", params={"run": r["path"]}).json()["total"] for r in runs]
    assert [(run["name"], total) for run, total in zip(runs, totals, strict=True)] == [
        ("grpo", 30),
        ("qwen", 18),
    ]
    # A page that was loaded before asks for what it shows.
    assert client.get("/samples", params={"run": first["path"]}).json()["total"] == 18


def test_ctrl_c_ends_the_server_quietly(tmp_path):
    words = [sys.executable, "-m", "openrlhf.cli.report", make_run(tmp_path), "--serve", "--port=0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        address = re.search(rb"http://\S+", process.stdout.readline())[0].decode()
        with urllib.request.urlopen(address):  # the server runs
            process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 0


def test_a_run_that_fails_leaves_its_report_and_the_reason_for_later_ones(tmp_path):
    run_dir = tmp_path / "run"
    with pytest.raises(ValueError), reporting(config_of(run_dir), is_resumed=False):
        make_run(run_dir)
        raise ValueError("weights <b>did not</b> arrive")
    page = (run_dir / "report.html").read_text()
    ended = "ended after step 3: ValueError: weights &lt;b&gt;did not&lt;/b&gt; arrive"
    assert ended in page
    assert (run_dir / "curves.png").is_file()
    report(run_dir)
    assert (run_dir / "report.html").read_text() == page
    (run_dir / "ended.json").unlink()
    report(run_dir)
    assert "at step 3, not finished" in (run_dir / "report.html").read_text()


def config_of(run_dir: Path) -> SFTConfig:
    return SFTConfig.model_validate({"ckpt": {"output_dir": str(run_dir)}})


@pytest.mark.parametrize(
    ("is_used", "is_resumed", "error", "is_written"),
    [
        (False, False, ConfigError("no room"), False),
        (True, True, ConfigError("other weights"), False),
        (False, False, RuntimeError("out of memory"), True),
        (True, False, RuntimeError("out of memory"), False),  # the folder is another run's
        (True, True, RuntimeError("out of memory"), True),
    ],
)
def test_a_run_that_fails_while_models_load_has_a_report_and_one_refused_has_none(
    is_used, is_resumed, error, is_written, tmp_path
):
    run_dir = make_run(tmp_path / "run") if is_used else tmp_path / "run"
    before = (run_dir / "config.yaml").read_text() if is_used else None
    with pytest.raises(type(error)), reporting(config_of(run_dir), is_resumed=is_resumed):
        raise error
    assert (run_dir / "report.html").exists() == is_written == (run_dir / "ended.json").exists()
    if is_written:
        assert "RuntimeError: out of memory" in (run_dir / "report.html").read_text()
    elif is_used:
        assert (run_dir / "config.yaml").read_text() == before


def test_a_run_that_is_refused_after_the_earlier_one_was_moved_leaves_no_ending(tmp_path):
    run_dir = make_run(tmp_path / "run")
    with pytest.raises(ConfigError), reporting(config_of(run_dir), is_resumed=False):
        set_earlier_run_aside(run_dir, keeps_model=False)
        raise ConfigError("no room")
    assert {path.name for path in run_dir.iterdir()} & {"ended.json", "report.html"} == set()


@pytest.mark.parametrize("left", [(), ("rollouts",), ("dumps",)])
def test_samples_of_a_first_step_that_failed_are_moved_aside(left, tmp_path):
    (tmp_path / "ended.json").write_text('{"error": "ValueError: nan"}')
    for name in left:
        (tmp_path / name).mkdir()
    moved = set_earlier_run_aside(tmp_path, keeps_model=False)
    assert (moved is not None) == bool(left)
    assert not (tmp_path / "ended.json").exists()
    assert not any((tmp_path / name).exists() for name in left)


def test_a_folder_of_runs_stands_for_its_runs(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 0, "eval/eval_all_pass1": 0.5}\n')
    assert [run.name for run in read_runs([tmp_path])] == ["a", "b"]


def test_a_page_that_cannot_be_written_is_an_error_in_a_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written .*Type --output FILE"):
        write_report([tmp_path], tmp_path / "metrics.jsonl" / "report.html")


def test_a_page_is_not_written_to_the_name_of_a_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"curves.png is a page. Type a name that ends in .html"):
        write_report([tmp_path], tmp_path / "curves.png")


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    run_dir = tmp_path / "run"
    with reporting(config_of(run_dir), is_resumed=False):
        make_run(run_dir)
        (run_dir / "rollouts" / "step_000001.parquet").write_bytes(b"torn")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {run_dir}/report.html was not written (")


def test_training_that_fails_while_models_load_ends_with_a_report_and_starts_anew(
    tmp_path, monkeypatch, capsys
):
    root, run_dir = make_inputs(tmp_path), tmp_path / "run"

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(train_rl, "init_models", fail)
        for seed in ("1", "2"):  # each start says its own
            assert start(root, run_dir, GRPO, "--max_samples", "4", "--seed", seed) != 0
            assert f"seed: {seed}\n" in (run_dir / "config.yaml").read_text()
    page = (run_dir / "report.html").read_text()
    assert "ended after step 0: RuntimeError: out of memory" in page
    assert start(root, run_dir, GRPO, "--max_samples", "4") == 0
    assert "finished, step 1" in (run_dir / "report.html").read_text()
    assert not (run_dir / "aside-1").exists() and "moved to" not in capsys.readouterr().out
