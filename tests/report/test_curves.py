"""Which curves a report has, and their numbers."""

from pathlib import Path

from openrlhf.report.curves import main_panels, make_panels, step_times, thinned
from openrlhf.report.run_folder import Run, read_runs
from tests.report.run_folders import make_run, write_metrics


def run_of(path: Path, records: list[dict]) -> Run:
    write_metrics(path, records)
    return read_runs([path])[0]


def test_reward_and_its_parts_share_a_panel_and_every_other_metric_has_one(tmp_path):
    panels = {p.title: p for p in make_panels(read_runs([make_run(tmp_path)]))}
    assert [c.metric for c in panels["reward"].curves] == ["reward", "reward/format"]
    assert panels["reward"].curves[0].values == [0.25, 0.5, 0.75]
    assert panels["KL"].curves[0].values == [0.01, 0.01, None]
    assert panels["memory"].section == "time"
    assert panels["extra/num_lines"].section == "others"
    assert not any("timing" in title or "stderr" in title for title in panels)


def test_evaluations_have_standard_errors(tmp_path):
    [panel] = [p for p in make_panels(read_runs([make_run(tmp_path)])) if p.title == "evaluation"]
    [curve] = panel.curves
    assert (curve.steps, curve.values, curve.errors) == ([0, 3], [0.25, 0.5], [0.125, 0.125])


def test_the_first_view_draws_what_tells_whether_the_run_learned(tmp_path):
    assert main_panels(make_panels(read_runs([make_run(tmp_path / "rl")]))) == [
        "evaluation",
        "reward",
    ]
    records = [{"step": step, "gpt_loss": 2.0, "acc": 0.5, "lr": 1e-6} for step in (1, 2)]
    assert main_panels(make_panels([run_of(tmp_path / "sft", records)])) == ["loss", "accuracy"]
    assert main_panels(make_panels([run_of(tmp_path / "once", records[:1])])) == []


def test_the_clock_starts_when_the_first_step_began_and_an_evaluation_does_not_move_its_step(
    tmp_path,
):
    records = [
        {"step": 1, "time": 1090.0, "timing/step_total": 90.0, "reward": 0.5},
        {"step": 2, "time": 1120.0, "timing/step_total": 30.0, "reward": 0.5},
        {"step": 2, "time": 1300.0, "eval/eval_sums_pass1": 0.5},
        {"step": 3, "time": 1330.0, "timing/step_total": 30.0, "reward": 0.5},
    ]
    assert run_of(tmp_path, records).seconds() == {1: 90.0, 2: 120.0, 3: 330.0}


def test_the_first_line_of_a_log_is_of_all_steps_that_it_logs(tmp_path):
    records = [
        {"step": step, "time": 1000.0 + 60 * step, "timing/step_total": 60.0, "reward": 0.5}
        for step in (100, 200)
    ]
    run = run_of(tmp_path, records)
    run.settings["logger.logging_steps"] = "100"
    assert run.seconds() == {100: 6000.0, 200: 12000.0}
    run.settings["logger.logging_steps"] = "1"  # it went on from another folder
    assert run.seconds() == {100: 60.0, 200: 6060.0}


def test_runs_lie_over_each_other(tmp_path):
    runs = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1)])
    [panel] = [p for p in make_panels(runs) if p.title == "reward"]
    found = {c.run: c.values for c in panel.curves if c.metric == "reward"}
    assert found == {"a": [0.25, 0.5, 0.75], "b": [1.25, 1.5, 1.75]}


def test_a_supervised_run_has_loss_accuracy_and_rate_with_its_evaluations(tmp_path):
    records = [
        {"step": 1, "gpt_loss": 2.0, "acc": 0.5, "lr": 1e-6, "grad_norm": 3.0},
        {"step": 1, "eval/gpt_loss": 1.75, "eval/ppl": 5.75},
        {"step": 2, "gpt_loss": 1.5, "acc": 0.75, "lr": 5e-7, "grad_norm": 2.0},
    ]
    panels = {p.title: p for p in make_panels([run_of(tmp_path, records)])}
    assert list(panels) == ["loss", "accuracy", "gradient norm", "learning rate", "eval/ppl"]
    trained, evaluated = panels["loss"].curves
    assert (trained.values, evaluated.values) == ([2.0, 1.5], [1.75])
    assert (trained.is_evaluation, evaluated.is_evaluation) == (False, True)


def test_the_phases_of_a_step_have_the_names_of_the_step_line(tmp_path):
    times = step_times(read_runs([make_run(tmp_path)])[0])
    assert times["phases"] == {"gen": [2.0] * 3, "train": [1.0] * 3, "save": [0.25] * 3}
    assert (times["steps"], times["total"]) == ([1, 2, 3], [3.5] * 3)


def test_many_points_become_means_of_neighbours_at_the_last_of_their_steps():
    steps, (values, others) = thinned([1, 2, 3, 4, 5], [[1.0, 3.0, None, 5.0, 7.0], [None] * 5], 3)
    assert (steps, values, others) == ([2, 4, 5], [2.0, 5.0, 7.0], [None] * 3)


def test_hints_say_from_which_step_on_something_was_wrong(tmp_path):
    [run] = read_runs([make_run(tmp_path, num_steps=4)])
    assert [(step, text.split(",")[0]) for step, text in run.hints] == [
        (2, "all samples of every prompt got the same reward"),
        (3, "not finite: kl"),
    ]
